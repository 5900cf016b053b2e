"""A model of peft's is an App like any other: what it trains is what travels, and it is merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from safetensors.numpy import load_file
from transformers import BertConfig, BertForSequenceClassification

import anabranch as ab
from anabranch.workloads.adapters import merged
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.torch_loop import evaluate
from anabranch.workloads.trainer import trainer_for

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
UPDATES = 100


class Sentences(App):
    """Whether there is a 1 among the words, by a tiny BERT that is made here: nothing is downloaded."""

    optimizer = torch.optim.Adam

    def model(self) -> Any:
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForSequenceClassification(BertConfig(vocab_size=20, **SIZES, **dropout))

    def data(self, shard: Shard) -> Examples:
        words = np.random.default_rng(shard.index).integers(1, 10, (64, 6))
        return Examples(words, (words == 1).any(1).astype(np.int64))


class Lora(Sentences):
    def model(self) -> Any:
        config = LoraConfig(
            task_type=TaskType.SEQ_CLS, r=2, target_modules=["query", "value"], lora_dropout=0.0
        )
        return get_peft_model(super().model(), config)


class Prompts(Sentences):
    def model(self) -> Any:
        return get_peft_model(
            super().model(), PromptTuningConfig(task_type=TaskType.SEQ_CLS, num_virtual_tokens=3)
        )


def run(app: App, folder: Path) -> ab.Run:
    settings = {"client.learning_rate": 0.01, "client.steps": 2}
    return ab.simulate(
        app, strategy="fedasync", settings=settings, until=ab.Until(updates=UPDATES), out=folder
    )


@pytest.mark.parametrize("kind", [Lora, Prompts])
def test_what_peft_trains_is_what_travels(kind: type[App], tmp_path: Path) -> None:
    app = kind()
    done = run(app, tmp_path / "run")
    model = app.model()
    trained, total = model.get_nb_trainable_parameters()
    assert done.result.uplink_bytes <= UPDATES * 4 * trained * 1.01
    assert 5 * trained < total
    spec = trainer_for(app).spec
    assert sum(t.size for t in spec.tensors if t.aggregated) == trained
    assert done.replay().matches


def test_a_run_is_merged_into_the_model_that_it_is_of(tmp_path: Path) -> None:
    done = run(Lora(), tmp_path / "run")
    tensors = load_file(tmp_path / "run" / "final.safetensors")
    found, plain = merged(Lora().model(), tensors), Sentences().model()
    plain.load_state_dict({name: torch.from_numpy(array) for name, array in found.items()})
    measured = evaluate(plain, Sentences().data(Shard("test")))
    assert measured["loss"] == pytest.approx(done.result.history[-1].loss, rel=1e-4)
