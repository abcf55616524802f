"""Ways to a Gauss-Newton product: this library's, the classical one, and those of other libraries.

A way *linearizes* the network at its parameters, as far as that can be done ahead, and then *multiplies*.
The other libraries are optional: ``benchmarks/peers.txt`` names them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from blockhf import GaussNewton, blocks
from blockhf.blocks import Block, Group
from blockhf.curvature import Products
from blockhf.isolation import twice_differentiable
from blockhf.policy import PolicyState
from blockhf.samples import Samples

Multiply = Callable[[Any], Any]
"""The product with a vector, in the way's own format of vectors."""


@dataclass(frozen=True)
class Network:
    """A network with its loss and samples.

    Attributes:
        name: As in the table.
        model: The network.
        batch: Inputs and targets.
        loss: From outputs and targets, averaged over the samples.
        in_jax: The same network in JAX: from parameters by name, and inputs, to outputs.
        jax_loss: The same loss in JAX.
        groups: A partition into blocks, those of the paper.
        is_long: Whether it has too many operations to be traced in seconds.
    """

    name: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    in_jax: Callable[[dict[str, Any], Any], Any]
    jax_loss: Callable[[Any, Any], Any]
    groups: Sequence[Group] = field(default=())
    is_long: bool = False

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def to(self, device: str) -> Network:
        """The same on a device; the model's parameters move and stay who they are."""
        self.model.to(device)
        inputs, targets = self.batch
        return replace(self, batch=(inputs.to(device), targets.to(device)))

    def objective(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = self.model(batch[0])
        return outputs, self.loss(outputs, batch[1])

    def gradient(self) -> Any:
        _, loss = self.objective(self.batch)
        return torch.autograd.grad(loss, self.params)

    def samples(self, groups: Sequence[Group] | None = None, micro_batch_size: int | None = None) -> Samples:
        """The batch with curvature from passes of its own, as where its samples are not the gradient's."""
        partition = [
            Block(group["name"], tuple(param for _, param in group["params"]))
            for group in groups or blocks.single(self.model)
        ]
        return Samples(self.objective, self.batch, partition, micro_batch_size=micro_batch_size)


class UnavailableError(Exception):
    """The way is not there for this network or on this machine; the message says why."""


@dataclass(frozen=True)
class Way:
    """A way to a product.

    Attributes:
        name: As in the table.
        linearize: All that need not be done again for each product.
        enter: From a flat tensor to the way's own format of vectors.
        leave: Back to a flat tensor.
        gradient: The gradient in the way's own framework, if that is not torch.
    """

    name: str
    linearize: Callable[[], Multiply]
    enter: Callable[[Tensor], Any] = lambda vector: vector
    leave: Callable[[Any], Tensor] = lambda vector: vector
    gradient: Callable[[], Any] | None = None


def ours(name: str, network: Network, products: Products, groups: Sequence[Group] | None = None) -> Way:
    """This library's products, with one block or with the diagonal blocks of ``groups``."""
    samples, state = network.samples(groups), PolicyState()
    sizes = [block.size for block in samples.blocks]

    def linearize() -> Multiply:
        operator = products.linearize(GaussNewton(), samples, [100] * len(sizes), state)
        if len(sizes) == 1:
            return lambda vector: operator.product(0, 0, vector)

        def multiply(vector: Tensor) -> Tensor:
            pieces = enumerate(torch.split(vector, sizes))
            return torch.cat([operator.product(index, index, piece) for index, piece in pieces])

        return multiply

    return Way(name, linearize)


def three_backward_passes(network: Network) -> Way:
    """The classical product: forward pass, backward pass, its transpose, and backward pass again.

    The R-operator by double backward (J. Townsend, 2017), rebuilt for each product. So do several
    implementations of Hessian-free optimization, e.g. PyTorchHessianFree.
    """
    whole = Block("all", tuple(network.params))

    def multiply(vector: Tensor) -> Tensor:
        with twice_differentiable():
            outputs, loss = network.objective(network.batch)
            dummy = torch.zeros_like(outputs, requires_grad=True)
            transposed = torch.autograd.grad(outputs, whole.params, dummy, create_graph=True)
            (tangent,) = torch.autograd.grad(transposed, dummy, whole.unflatten(vector))
            (slope,) = torch.autograd.grad(loss, outputs, create_graph=True)
            (curved,) = torch.autograd.grad(slope, outputs, tangent, retain_graph=True)
            return whole.flatten(torch.autograd.grad(outputs, whole.params, curved))

    return Way("three backward passes", lambda: multiply)


def curvlinops(network: Network) -> Way:
    """``curvlinops.GGNLinearOperator``."""
    library = _module("curvlinops")

    def linearize() -> Multiply:
        loss = _Loss(network.loss)
        operator = library.GGNLinearOperator(
            network.model, loss, network.params, [network.batch], check_deterministic=False
        )

        def multiply(vector: Tensor) -> Any:
            with twice_differentiable():
                return operator @ vector

        return multiply

    return Way("curvlinops", linearize)


def backpack(network: Network) -> Way:
    """``backpack.hessianfree``'s product, with a forward pass: its graph is gone after each product."""
    library = _module("backpack.hessianfree.ggnvp")
    whole = Block("all", tuple(network.params))

    def multiply(vector: Tensor) -> Tensor:
        with twice_differentiable():
            outputs, loss = network.objective(network.batch)
            product = library.ggn_vector_product(loss, outputs, network.model, whole.unflatten(vector))
        return whole.flatten(product)

    return Way("BackPACK", lambda: multiply)


def jax(network: Network) -> Way:
    """``jax.linearize``, its transpose and ``jit``, with the residuals computed ahead."""
    library = _module("jax")
    numpy = library.numpy
    names = [name for name, _ in network.model.named_parameters()]
    shapes = [param.shape for param in network.params]
    inputs, targets = (numpy.asarray(tensor.numpy()) for tensor in network.batch)

    def native(tensors: Sequence[Tensor]) -> dict[str, Any]:
        arrays = (numpy.asarray(tensor.detach().contiguous().numpy()) for tensor in tensors)
        return dict(zip(names, arrays, strict=True))

    values = native(network.params)

    def linearized(params: Any, inputs: Any) -> Any:
        return library.linearize(lambda params: network.in_jax(params, inputs), params)

    def product(outputs: Any, pushforward: Any, vector: Any, targets: Any) -> Any:
        slope = library.grad(lambda outputs: network.jax_loss(outputs, targets))
        _, curved = library.jvp(slope, (outputs,), (pushforward(vector),))
        return library.linear_transpose(pushforward, vector)(curved)[0]

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        return network.jax_loss(network.in_jax(params, inputs), targets)

    prepare, multiply, gradient = map(library.jit, (linearized, product, library.grad(loss)))

    def linearize() -> Multiply:
        outputs, pushforward = library.block_until_ready(prepare(values, inputs))
        return lambda vector: library.block_until_ready(multiply(outputs, pushforward, vector, targets))

    def enter(vector: Tensor) -> Any:
        pieces = torch.split(vector, [shape.numel() for shape in shapes])
        return native([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])

    def leave(vector: Any) -> Tensor:
        return torch.cat([from_dlpack(vector[name]).flatten() for name in names])

    return Way(
        "JAX",
        linearize,
        enter,
        leave,
        lambda: library.block_until_ready(gradient(values, inputs, targets)),
    )


class _Loss(nn.Module):
    """A loss as a module that says how it sums up its samples."""

    reduction = "mean"

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{error.name or name} is not installed") from error


# The networks in JAX: plain functions of the parameters' names in torch.


def jax_squared_error(outputs: Any, targets: Any) -> Any:
    return ((outputs - targets) ** 2).sum(axis=1).mean()


def jax_cross_entropy(outputs: Any, targets: Any) -> Any:
    jax = _module("jax")
    logarithms = jax.nn.log_softmax(outputs)
    return -jax.numpy.take_along_axis(logarithms, targets[..., None], axis=-1).mean()


def _linear(p: dict[str, Any], name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def jax_autoencoder(p: dict[str, Any], x: Any) -> Any:
    numpy = _module("jax.numpy")
    for half in ("encoder", "decoder"):
        layers = sorted({int(name.split(".")[1]) for name in p if name.startswith(half)})
        for layer in layers:
            x = _linear(p, f"{half}.{layer}", x)
            x = x if layer == layers[-1] else numpy.tanh(x)
    return x


def jax_residual(layout: str) -> Callable[[dict[str, Any], Any], Any]:
    """The residual network; ``layout`` is NCHW or NHWC, and pictures come in as torch has them."""

    def network(p: dict[str, Any], x: Any) -> Any:
        jax = _module("jax")
        numpy = jax.numpy

        def convolve(name: str, x: Any, stride: int = 1) -> Any:
            weight = p[f"{name}.weight"]
            padding = weight.shape[-1] // 2
            dimensions = (layout, "OIHW", layout)
            y = jax.lax.conv_general_dilated(
                x, weight, (stride, stride), [(padding, padding)] * 2, dimension_numbers=dimensions
            )
            bias = p.get(f"{name}.bias")
            if bias is None:
                return y
            return y + (bias if layout == "NHWC" else bias[:, None, None])

        if layout == "NHWC":
            x = numpy.transpose(x, (0, 2, 3, 1))
        x = jax.nn.relu(convolve("first", x))
        for index, stride in enumerate((1, 2, 2)):
            block = f"residual.{index}"
            changed = f"{block}.shortcut.weight" in p
            shortcut = convolve(f"{block}.shortcut", x, stride) if changed else x
            inner = jax.nn.relu(convolve(f"{block}.enter", x, stride))
            x = jax.nn.relu(convolve(f"{block}.leave", inner) + shortcut)
        return _linear(p, "head", x.mean(axis=(1, 2) if layout == "NHWC" else (2, 3)))

    return network


def jax_lstm(p: dict[str, Any], x: Any) -> Any:
    jax = _module("jax")
    numpy = jax.numpy
    states = numpy.transpose(x, (2, 1, 0))  # features, steps, samples, as in torch
    num_layers = sum(name.endswith("hidden_weight") for name in p)
    for index in range(num_layers):
        own = {name: p[f"lstm.layers.{index}.{name}"] for name in _LSTM_PARAMS}
        size, (steps, samples) = own["hidden_weight"].shape[1], states.shape[1:]
        projected = own["input_weight"] @ states.reshape(states.shape[0], -1) + own["bias"][:, None]
        projected = projected.reshape(4 * size, steps, samples).swapaxes(0, 1)

        def step(carry: Any, from_inputs: Any, own: dict[str, Any] = own) -> Any:
            hidden, cell = carry
            enter, forget, candidate, output = numpy.split(from_inputs + own["hidden_weight"] @ hidden, 4)
            enter = jax.nn.sigmoid(enter + own["entry_peepholes"][0] * cell)
            forget = jax.nn.sigmoid(forget + own["entry_peepholes"][1] * cell)
            cell = forget * cell + enter * numpy.tanh(candidate)
            hidden = jax.nn.sigmoid(output + own["output_peephole"] * cell) * numpy.tanh(cell)
            return (hidden, cell), hidden

        zeros = numpy.zeros((size, samples), states.dtype)
        _, hidden = jax.lax.scan(step, (zeros, zeros), projected)
        states = hidden.swapaxes(0, 1)
    return _linear(p, "head", states[:, -1].T)


_LSTM_PARAMS = ("input_weight", "hidden_weight", "bias", "entry_peepholes", "output_peephole")


def jax_transformer(num_heads: int) -> Callable[[dict[str, Any], Any], Any]:
    def network(p: dict[str, Any], tokens: Any) -> Any:
        jax = _module("jax")
        numpy = jax.numpy

        def norm(name: str, x: Any) -> Any:
            centered = x - x.mean(-1, keepdims=True)
            scale = jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
            return centered * scale * p[f"{name}.weight"] + p[f"{name}.bias"]

        x = p["tokens.weight"][tokens] + p["positions"][: tokens.shape[1]]
        for index in range(sum(name.endswith("merge.weight") for name in p)):
            layer = f"layers.{index}"
            projected = _linear(p, f"{layer}.projection", norm(f"{layer}.attention_norm", x))
            query, key, value = (
                part.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)
                for part in numpy.split(projected, 3, axis=-1)
            )
            scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
            seen = (jax.nn.softmax(scores) @ value).swapaxes(1, 2).reshape(x.shape)
            x = x + _linear(p, f"{layer}.merge", seen)
            inner = _linear(p, f"{layer}.feed.0", norm(f"{layer}.feed_norm", x))
            x = x + _linear(p, f"{layer}.feed.2", jax.nn.gelu(inner, approximate=False))
        return _linear(p, "head", norm("norm", x))

    return network
