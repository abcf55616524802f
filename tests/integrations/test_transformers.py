"""Hugging Face's own Trainer, current release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from blockhf import BlockHF, blocks
from blockhf.integrations.transformers import BlockHFTrainer, num_labels
from children import starts_processes
from integration_tasks import example, run

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")


def test_a_text_classifier_trains_and_resumes_to_equal_parameters(tmp_path: Path) -> None:
    own = run("trainers/hf_trainer", *TINY, str(tmp_path))
    assert own["equal"]
    assert own["steps"] == 4
    assert own["losses"][-1] < own["losses"][0]
    assert own["rates"] == {1.0}  # no schedule unless asked for


TINY = ("--samples", "160", "--width", "8", "--steps", "4", "--folder")


@starts_processes
def test_two_processes_share_their_samples_and_resume(tmp_path: Path) -> None:
    own = ranks.run(
        2, "integration_tasks:run", tmp_path / "ranks", "trainers/hf_trainer", *TINY, str(tmp_path / "run")
    )
    for each in own:
        assert each["equal"]
        assert each["steps"] == 4
        assert torch.equal(each["parameters"], own[0]["parameters"])
    assert own[0]["losses"][-1] < own[0]["losses"][0]  # rank 0 has the log


def settings(folder: Path, **options: Any) -> Any:
    import transformers

    fixed = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 3}
    return transformers.TrainingArguments(
        output_dir=str(folder), logging_steps=1, per_device_train_batch_size=32, **{**fixed, **options}
    )


def classifier() -> Any:
    import transformers

    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        num_labels=4,
    )
    return transformers.BertForSequenceClassification(config)


def test_an_optimizer_is_made_and_a_schedule_is_used_where_it_is_asked_for(tmp_path: Path) -> None:
    module = example("trainers/hf_trainer")
    own = settings(tmp_path, lr_scheduler_type="cosine", weight_decay=0.01)
    trainer = module.Trainer(classifier(), own, train_dataset=module.Sentences(64))
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert isinstance(trainer.optimizer.optimizer, BlockHF)
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.01}
    assert rates[0] > rates[1] > rates[2]


def test_language_models_with_labels_left_out_train_in_micro_batches(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=16, n_positions=12, n_embd=8, n_layer=1, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    words = torch.arange(12).repeat(32, 1).add(torch.arange(32)[:, None]) % 16
    labels = words.clone()
    for row, own in enumerate(labels):
        own[-(row % 8) :] = -100 if row % 8 else own[-1]
    data = [{"input_ids": w, "labels": own} for w, own in zip(words, labels, strict=True)]
    ends = []
    for micro_batch_size in (None, 5):
        torch.manual_seed(1)
        model = transformers.GPT2LMHeadModel(config).double()

        def weight(batch: Any) -> Any:
            return num_labels({"labels": batch["labels"][:, 1:]})

        optimizer = BlockHF.martens(
            blocks.single(model),
            damping=1.0,
            max_cg_steps=5,
            reduction=weight,
            micro_batch_size=micro_batch_size,
        )

        class Trainer(BlockHFTrainer, transformers.Trainer):
            pass

        trainer = Trainer(
            model, settings(tmp_path, max_steps=2), train_dataset=data, optimizers=(optimizer, None)
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[1] < losses[0]
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4, .*pass micro_batch_size= to"),
        ({"fp16": True}, "fp16=True, .*Use bfloat16"),
    ],
    ids=["accumulation", "float16"],
)
def test_settings_that_mean_nothing_are_refused_with_the_remedy(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    module = example("trainers/hf_trainer")
    try:
        own = settings(tmp_path, **options)
    except ValueError:
        pytest.skip("transformers itself refuses it here")
    with pytest.raises(ValueError, match=message):
        module.Trainer(classifier(), own, train_dataset=module.Sentences(8))
