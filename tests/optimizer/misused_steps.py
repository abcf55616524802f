"""What users get wrong when they make a step, and what they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from misuses import Misuse, exactly, refused
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pack_padded_sequence

from blockhf import BlockHF, Closure, Hessian, blocks
from optimizer_tasks import Task, equal, snapshot

Returned = Callable[[Tensor, Tensor], Any]
WRITE = r"Write `return outputs, loss`, where the loss is computed from the outputs\."


def step(task: Task, objective: Any, batch: Any, *more: Any, **options: Any) -> BlockHF:
    """A step; where it is refused, nothing may have moved."""
    optimizer = BlockHF(blocks.by_layer(task.model), **options)
    before = snapshot(task.model, optimizer)
    try:
        optimizer.step(objective, batch, *more)
    except Exception:
        assert equal(snapshot(task.model, optimizer), before)
        raise
    return optimizer


def returns(message: str, returned: Returned, kind: type[Exception] = ValueError, **options: Any) -> Misuse:
    """An objective that returns something else, from its outputs and targets."""

    def act() -> None:
        task = Task()
        step(task, lambda batch: returned(task.model(batch[0]), batch[1]), task.batch, **options)

    return Misuse(act, kind, message)


def given(message: str, batch: Callable[[Tensor, Tensor], Any], *more: Any, **options: Any) -> Misuse:
    """A batch of another kind, made from inputs and targets."""

    def act() -> None:
        task = Task()
        given = batch(*task.batch)
        step(task, lambda batch: task.objective((batch[0], task.batch[1])), given, *more, **options)

    return refused(message, act)


def calls(message: str, call: Callable[[BlockHF, Task], Any], kind: type[Exception] = ValueError) -> Misuse:
    """A call of ``step`` with other arguments."""

    def act() -> None:
        task = Task()
        optimizer = BlockHF(blocks.by_layer(task.model))
        before = snapshot(task.model, optimizer)
        try:
            call(optimizer, task)
        finally:
            assert equal(snapshot(task.model, optimizer), before)

    return Misuse(act, kind, message)


def backward_first(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.mse_loss(outputs, targets)
    loss.backward()
    return outputs, loss


def closure_of_lbfgs(optimizer: BlockHF, task: Task) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.objective(task.batch)[1]
        loss.backward()
        return loss

    optimizer.step(closure)


def autoencoder(outputs: Tensor, targets: Tensor) -> tuple[Any, Tensor]:
    """As a variational autoencoder: what comes first is an output too, and the rest is made from it."""
    decoded = outputs.tanh() * 2
    return (outputs, decoded), F.mse_loss(decoded, targets) + outputs.square().mean()


def recomputed(task: Task) -> Callable[[Any], tuple[Tensor, Tensor]]:
    return lambda batch: (task.model(batch[0]), F.mse_loss(task.model(batch[0]), batch[1]))


class OnceOnly(torch.autograd.Function):
    """The square, whose derivative is not differentiable."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * gradient


def once_in_the_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs, OnceOnly.apply(outputs - targets).mean()


def once_in_the_model(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    outputs = OnceOnly.apply(outputs)
    return outputs, F.mse_loss(outputs, targets)


class Speech(nn.Module):
    """A linear model of sequences and the loss of connectionist temporal classification."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(16, 8, 3), torch.randint(1, 5, (16, 3))

    def objective(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.layer(batch[0])
        number = len(logits)
        lengths = torch.full((number,), 8), torch.full((number,), 3)
        return logits, F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), batch[1], *lengths)


class Bags(nn.Module):
    """A mean of embeddings, whose kernel has one derivative."""

    def __init__(self, kind: type[nn.Module] = nn.EmbeddingBag, **options: Any) -> None:
        super().__init__()
        self.words, self.layer = kind(10, 4, **options), nn.Linear(4, 2)

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randint(10, (16, 3)), torch.randn(16, 2)

    def objective(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        words = self.words(batch[0])
        outputs = self.layer(words if words.dim() == 2 else words.mean(1))
        return outputs, F.mse_loss(outputs, batch[1])


def of_model(message: str, make: Callable[[], Any], **options: Any) -> Misuse:
    def act() -> None:
        model = make()
        BlockHF(blocks.by_layer(model), **options).step(model.objective, model.batch())

    return refused(message, act)


OBJECTIVES: dict[str, Misuse] = {
    "a closure that calls backward": returns(
        r"The graph of the loss is gone: the objective calls backward\(\) itself\. Leave that, and "
        r"zero_grad\(\), to the optimizer: return outputs and loss\.",
        backward_first,
    ),
    "the closure of LBFGS": calls(
        r"The graph of the loss is gone: the objective calls backward\(\) itself", closure_of_lbfgs
    ),
    "the loss alone": returns(
        f"The objective gave no outputs that can be differentiated.*{WRITE}", lambda o, t: F.mse_loss(o, t)
    ),
    "nothing at all": returns(f"The objective returned a NoneType, not a pair. {WRITE}", lambda o, t: None),
    "three things": returns(
        f"The objective returned a tuple, not a pair. {WRITE}", lambda o, t: (o, F.mse_loss(o, t), t)
    ),
    "a list for a pair": returns(
        f"The objective returned a list, not a pair. {WRITE}", lambda o, t: [o, F.mse_loss(o, t)]
    ),
    "a dict for a pair": returns(
        f"The objective returned a dict, not a pair. {WRITE}", lambda o, t: {"loss": F.mse_loss(o, t)}
    ),
    "a number for the loss": returns(
        r"The objective's loss is a float, not a tensor.*Leave out \.item\(\) and float\(\)\.",
        lambda o, t: (o, F.mse_loss(o, t).item()),
    ),
    "loss and outputs, swapped": returns(
        r"The objective's loss has shape \(16, 2\), but must be one number\..*swapped",
        lambda o, t: (F.mse_loss(o, t), o),
    ),
    "a loss for each sample": returns(
        r"The objective's loss has shape \(16,\), but must be one number\. Write loss\.mean\(\), or "
        r"loss\.sum\(\) together with reduction='sum'\.",
        lambda o, t: (o, (o - t).square().sum(1)),
    ),
    "no outputs": returns(
        f"The objective gave no outputs that can be differentiated.*{WRITE}",
        lambda o, t: ((), F.mse_loss(o, t)),
    ),
    "detached outputs": returns(
        f"The objective gave no outputs that can be differentiated.*{WRITE}",
        lambda o, t: (o.detach(), F.mse_loss(o, t)),
    ),
    "a detached loss": returns(
        r"The loss does not depend on any parameter through the graph\. Leave out detach\(\), \.data, "
        r"torch\.no_grad\(\) and backward\(\) in the objective\.",
        lambda o, t: (o, F.mse_loss(o.detach(), t)),
    ),
    "outputs that the loss does not use": returns(
        f"The loss does not depend on the outputs through the graph.*{WRITE}",
        lambda o, t: (o * 2, F.mse_loss(o, t)),
    ),
    "a copy that was computed again": refused(
        f"The loss does not depend on the outputs through the graph.*re-computed copy. {WRITE}",
        lambda: step(task := Task(), recomputed(task), task.batch),
    ),
    "outputs of each other": returns(
        r"Output 1, of shape \(16, 2\), is computed from another output\..*return x\.clone\(\) of the "
        r"earlier one and compute the loss from the clone\.",
        autoencoder,
    ),
    "an output twice": returns(
        r"Output 0, of shape \(16, 2\), is computed from another output\.",
        lambda o, t: ((o, o), F.mse_loss(o, t)),
    ),
    "complex outputs": returns(
        r"An output is complex.*Return torch\.view_as_real\(outputs\), and compute the loss from that\.",
        lambda o, t: (z := torch.complex(o, o), (z - t).abs().square().mean()),
    ),
    "a complex loss": returns(
        r"The objective's loss is of torch\.complex128, but must be a real number\. Write loss\.abs\(\) or "
        r"loss\.real\.",
        lambda o, t: (o, torch.complex(o, o).mean()),
    ),
    "an operation of the loss with one derivative": returns(
        r"An operation of the loss cannot be differentiated twice \(.*once_differentiable\): use "
        r"curvature=EmpiricalFisher\(\)",
        once_in_the_loss,
    ),
    "an operation of the model with one derivative": returns(
        r"An operation of the network cannot be differentiated twice \(.*once_differentiable\): write it out",
        once_in_the_model,
    ),
    "one derivative and the Hessian": returns(
        r"An operation of the loss cannot be differentiated twice \(OnceOnly .*once_differentiable\)",
        once_in_the_loss,
        curvature=Hessian(),
    ),
    "CTC with Gauss-Newton": of_model(
        r"An operation of the loss cannot be differentiated twice \(.*ctc_loss.*\): use "
        r"curvature=EmpiricalFisher\(\)",
        Speech,
    ),
    "bags of embeddings": of_model(
        r"An operation of the network cannot be differentiated twice \(.*embedding_bag.*\): write it out",
        Bags,
    ),
    "sparse gradients": of_model(
        exactly("A gradient of block 'words' is sparse. Build the layer with sparse=False."),
        lambda: Bags(nn.Embedding, sparse=True),
    ),
}

CALLS: dict[str, Misuse] = {
    "no closure": calls(
        r"step\(\) was called without an objective\. .*Pass step\(objective, batch\), or step\(closure\) "
        r"with a closure that returns outputs and loss and does not call backward\(\)\.",
        lambda optimizer, task: optimizer.step(None),
    ),
    "no argument at all": calls(
        r"step\(\) was called without an objective\.",
        lambda optimizer, task: optimizer.step(),
    ),
    "a closure with a batch and a batch": calls(
        exactly("The Closure has its batch already: pass step(closure), or step(objective, batch)."),
        lambda optimizer, task: optimizer.step(Closure(task.objective, task.batch), task.batch),
    ),
    "batch and objective, swapped": calls(
        r"The objective is a tuple, which cannot be called\.",
        lambda optimizer, task: optimizer.step(task.batch, task.objective),
    ),
    "a loss for an objective": calls(
        r"The objective is a Tensor, which cannot be called\.",
        lambda optimizer, task: optimizer.step(task.objective(task.batch)[1]),
    ),
    "the model for an objective": calls(
        r"The objective gave no outputs|The objective's loss has shape \(16, 2\)",
        lambda optimizer, task: optimizer.step(task.model, task.batch[0]),
    ),
    "an objective of two arguments": calls(
        r"its own are \(x, y\): missing.*The batch is passed as one argument.*write `def "
        r"objective\(batch\):` and `inputs, targets = batch`",
        lambda optimizer, task: optimizer.step(lambda x, y: task.objective((x, y)), task.batch),
        TypeError,
    ),
    "an objective of no arguments and a batch": calls(
        r"its own are \(\): too many.*An objective of no arguments goes with step\(objective\)",
        lambda optimizer, task: optimizer.step(lambda: task.objective(task.batch), task.batch),
        TypeError,
    ),
    "an objective that waits for a batch": calls(
        r"called with no argument, and its own are \(batch: .*Give the batch to it: step\(objective, batch\)",
        lambda optimizer, task: optimizer.step(task.objective),
        TypeError,
    ),
    "the batch in two arguments": calls(
        r"third argument of step is the curvature batch.*: torch\.int64 of 1 dimensions against "
        r"torch\.float64 of 2 dimensions\. Pass inputs and targets together, "
        r"as step\(objective, \(inputs, targets\)\)",
        lambda optimizer, task: optimizer.step(task.objective, task.batch[0], torch.arange(16)),
    ),
    "a curvature batch without a batch": calls(
        exactly("A curvature batch was given without a gradient batch. Give both."),
        lambda optimizer, task: optimizer.step(task.objective, curvature_batch=task.batch),
    ),
    "everything frozen": calls(
        exactly("Every parameter is frozen. Thaw some with requires_grad_(True)."),
        lambda optimizer, task: (
            task.model.requires_grad_(False),
            optimizer.step(task.objective, task.batch),
        ),
    ),
    "packed sequences": given(
        r"The batch holds a PackedSequence.*pack them in the objective with pack_padded_sequence",
        lambda x, y: (pack_padded_sequence(x[:, :, None], [3] * 16, batch_first=True), y),
    ),
    "a sparse tensor": given(
        r"The batch holds a tensor of layout torch\.sparse_coo.*Pass a dense one, and convert it",
        lambda x, y: (x.to_sparse(), y),
    ),
    "a nested tensor": given(
        r"The batch holds a (nested tensor|tensor of layout torch\.jagged).*Pass a dense one",
        lambda x, y: (torch.nested.nested_tensor(list(x), layout=torch.jagged), y),
    ),
    "an empty batch": given(r"The batch is empty\. Pass at least one sample", lambda x, y: (x[:0], y[:0])),
    "tensors of different lengths": given(
        r"The tensors of the batch have different first dimensions: 15, 16\. Put the samples first in each",
        lambda x, y: (x, y[1:]),
    ),
    "a batch without tensors": given(
        r"The batch holds no tensor with a sample dimension\. Pass tensors.*or call step\(objective\)",
        lambda x, y: {"inputs": 3.0},
    ),
    "a batch of one number": given("The batch holds no tensor with a sample dimension", lambda x, y: x.sum()),
    "a population smaller than the batch": given(
        r"population is 15, but the batch alone has 16 samples\. .*len\(dataset\)",
        lambda x, y: (x, y),
        population=15,
    ),
    "a weight that is negative": given(
        r"reduction gave the weight -1\.0 for a part of the batch, but weights must be finite numbers and "
        r"not negative",
        lambda x, y: (x, y),
        reduction=lambda batch: -1.0,
    ),
    "a weight that is no number": given(
        r"reduction gave the weight 'all' for a part of the batch, but",
        lambda x, y: (x, y),
        reduction=lambda batch: "all",
    ),
}


def warned(message: str, returned: Returned, **options: Any) -> Misuse:
    """A loss whose curvature is of no use; the report says so too, and a second step says no more."""

    def act() -> None:
        task = Task()

        def objective(batch: Any) -> tuple[Tensor, Tensor]:
            return returned(task.model(batch[0]), batch[1])

        optimizer = step(task, objective, task.batch, **options)
        assert optimizer.report is not None
        assert len(optimizer.report.warnings) == 1
        optimizer.step(objective, task.batch)

    return Misuse(act, UserWarning, message)


ZERO = (
    r"The curvature along the gradient is zero.*Return what comes before it as outputs, e\.g\. the logits, "
    r"or use curvature=EmpiricalFisher\(\)"
)


def log_probabilities(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    found = outputs.log_softmax(1)
    return found, F.nll_loss(found, (targets[:, 0] > 0).long())


def pinball(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    off = targets - outputs
    return outputs, torch.where(off > 0, 0.9 * off, -0.1 * off).mean()


def policy_gradient(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """REINFORCE with rewards of both signs."""
    chosen = outputs.log_softmax(1)[:, 0]
    return outputs, -(chosen * torch.linspace(-2, 1, len(chosen))).mean()


def clipped_ratio(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of proximal policy optimization."""
    chosen = outputs.log_softmax(1)[:, 0]
    ratio, gain = (chosen - chosen.detach()).exp(), torch.linspace(-1, 2, len(chosen))
    return outputs, -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


NEGATIVE = (
    r"The curvature along the gradient is negative.*use curvature=EmpiricalFisher\(\) or a Fisher matrix"
)
WARNED: dict[str, Misuse] = {
    "a linear loss": warned(ZERO, lambda o, t: (o, (o * t).mean())),
    "an absolute error": warned(ZERO, lambda o, t: (o, F.l1_loss(o, t))),
    "a hinge": warned(ZERO, lambda o, t: (o, (1 - o * t.sign()).clamp_min(0).mean())),
    "a pinball": warned(ZERO, pinball),
    "log-probabilities": warned(ZERO, log_probabilities),
    "a policy gradient": warned(NEGATIVE, policy_gradient),
    "a clipped ratio": warned(NEGATIVE, clipped_ratio),
    "a weighted mean in micro-batches": warned(
        r"The losses of two micro-batches add up to .*, and that of both together is .*: the loss is no "
        r"plain mean over samples\. Pass reduction=function",
        lambda o, t: (o, F.cross_entropy(o, torch.where(t[:, 0] > 0.5, -100, (t[:, 1] > 0).long()))),
        micro_batch_size=4,
    ),
}

TABLE = {**OBJECTIVES, **CALLS, **WARNED}
