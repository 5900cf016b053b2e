"""Trainers beyond the built-in Apps: buffers, precision, the contract with an App, and the gradient."""

from __future__ import annotations

import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import AppError, ConfigError, ManifestMismatch
from anabranch.core.model.params import Vector, digest
from anabranch.core.model.submodels import UnitMap, tensor_set, unit_map
from anabranch.core.model.units import Member, UnitGroup
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import stream
from anabranch.support.own_code import on_device
from anabranch.workloads import App, Examples, Shard, Trainer, trainer_for
from anabranch.workloads.batches import DrawnTogether, batches, planned_steps
from anabranch.workloads.synthetic import Synthetic, loss_and_gradient


class Counting(torch.nn.Module):
    """Keeps a count that the state dict does not have, and is noisy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(0.5)
        self.out = torch.nn.Linear(6, 3)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores: torch.Tensor = self.out(self.drop(self.norm(x)))
        return scores * self.calls


class Own(App):
    """An App around any model."""

    def __init__(self, made: Any, trained: Any = None) -> None:
        super().__init__()
        self._made, self._trained = made, trained

    def model(self) -> Any:
        return self._made()

    def data(self, shard: Shard) -> Examples:
        draws = stream(shard.index, "own")
        x = draws.standard_normal((33, 6))
        return Examples(x, x[:, :3].argmax(1).astype(np.int32))

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> Any:
        return self._trained(model) if self._trained else super().train(model, examples, plan, seed)


EXAMPLES = Own(Counting).data(Shard("train"))


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))


def scripted() -> Any:
    with warnings.catch_warnings(action="ignore"):  # that newer ways are to be taken
        return torch.jit.script(layers())


PLAN = LocalPlan(epochs=2, batch_size=32)


def tied() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 3))
    module[1].weight = module[0].weight
    return module


def test_an_update_of_a_tensor_of_two_names_is_what_was_trained_under_both() -> None:
    """A sparse codec may send a coordinate under one name alone: the next update is not the way back."""
    trainer = trainer_for(Own(tied))
    spec = trainer.spec
    first, last = spec.slices["0.weight"], spec.slices["1.weight"]
    agreed = spec.flatten(trainer.initial(0))
    apart = agreed.copy()
    apart[first] += 1.0  # of no effect: a state that is loaded leaves what the last name says
    idle = trainer_for(Own(tied, lambda model: {})).train(apart, {}, EXAMPLES, PLAN, 1)
    assert not idle.delta.any()
    deltas = [trainer.train(vector, {}, EXAMPLES, PLAN, 1).delta for vector in (agreed, apart)]
    assert deltas[0][last].any()
    for delta in deltas:
        assert np.array_equal(delta[first], delta[last])
    assert np.array_equal(deltas[0], deltas[1])


def halves(tied: bool = False) -> torch.nn.Module:
    """In float16, behind a layer of float32."""
    last = torch.nn.Linear(3, 3).half()
    module = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 3).half(), last)
    if tied:
        module[1].weight = last.weight
    return module


@pytest.mark.parametrize(
    "made",
    [
        halves,
        lambda: halves(tied=True),
        lambda: torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 3).double()),
        lambda: {"a": np.ones((2, 3), np.float16), "b": np.ones(2, np.float32), "n": np.ones((), np.int64)},
        lambda: {"a": np.ones(4, np.float32), "b": np.ones(3)},
    ],
    ids=["torch", "tied", "torch of 64 bits", "numpy", "numpy of 64 bits"],
)
def test_what_a_model_of_fewer_digits_rounds_is_not_sent_as_training(made: Any) -> None:
    """A version is a mean, of more digits than a float16: every device would send the way back at once."""
    step = 2.0**-8  # which all kinds hold, near 1

    def steps(model: Any) -> dict[str, float]:
        if isinstance(model, dict):
            for name in model:
                model[name] += model[name].dtype.type(step)
        else:
            torch._foreach_add_([p.data for p in model.parameters()], step)
        return {}

    trainer = trainer_for(Own(made, lambda model: {}))
    vector = np.full(trainer.spec.size, 1.0001, trainer.spec.vector_dtype)
    vector[::2] += 1e-9
    assert not trainer.train(vector, trainer.frozen, EXAMPLES, PLAN, 1).delta.any()
    delta = trainer_for(Own(made, steps)).train(vector, trainer.frozen, EXAMPLES, PLAN, 1).delta
    assert delta.dtype == vector.dtype
    np.testing.assert_allclose(delta, step, rtol=1e-4)


def test_all_names_of_nested_arrays_are_told_at_once() -> None:
    class Nested(App):
        def model(self) -> Any:
            dense = {"kernel": np.zeros((2, 2)), "bias": np.zeros(2)}
            return {
                "params": {"Dense_0": dense, "Dense_1": dense, "head": {"out": dense}},
                "step": np.zeros(1),
            }

        def data(self, shard: Shard) -> Any:
            raise AssertionError

    names = r"'params\.Dense_0\.kernel', 'params\.Dense_0\.bias', .*, 'params\.head\.out\.bias' and 1 more"
    with pytest.raises(AppError, match=f"has a dict at 'params': .* by the names {names}"):
        trainer_for(Nested())


def test_batch_norm_dropout_and_hidden_buffers_carry_nothing_over() -> None:
    trainer = trainer_for(Own(Counting))
    tensors = trainer.initial(0)
    vector, frozen = trainer.spec.flatten(tensors), {"norm.num_batches_tracked": np.array(7)}
    vector.setflags(write=False)
    first = trainer.train(vector, frozen, EXAMPLES, PLAN, 0)
    trainer.evaluate(vector, frozen, EXAMPLES)
    assert digest(first.delta) == digest(trainer.train(vector, frozen, EXAMPLES, PLAN, 0).delta)
    assert [t.name for t in trainer.spec.tensors if not t.aggregated] == ["norm.num_batches_tracked"]
    assert np.abs(first.delta[trainer.spec.slices["norm.running_mean"]]).max() > 0


def test_the_vector_follows_the_state_dict() -> None:
    torch.manual_seed(3)
    module = Counting()
    trainer = trainer_for(Own(lambda: module, lambda model: None))
    state = {name: t.numpy() for name, t in module.state_dict().items()}
    assert [t.name for t in trainer.spec.tensors] == list(state)
    vector = trainer.spec.flatten(state)
    assert not trainer.train(vector, {}, EXAMPLES, PLAN, 0).delta.any()


def test_a_scripted_model_is_measured_as_the_plain_one_and_trains_on() -> None:
    """TorchScript compiles it as it was first called: with gradients, for which it keeps tensors."""
    trainer, plain = (trainer_for(Own(made)) for made in (scripted, layers))
    vector = trainer.spec.flatten(trainer.initial(0))
    for seed in range(2):
        found, expected = (each.train(vector, {}, EXAMPLES, PLAN, seed) for each in (trainer, plain))
        np.testing.assert_allclose(found.delta, expected.delta, atol=1e-6)
        vector = vector + found.delta
        assert trainer.evaluate(vector, {}, EXAMPLES) == pytest.approx(plain.evaluate(vector, {}, EXAMPLES))


def test_torch_generators_outside_go_on_undisturbed() -> None:
    trainer = trainer_for(Own(Counting))
    vector = trainer.spec.flatten(trainer.initial(0))
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    trainer.train(vector, {}, EXAMPLES, PLAN, 0)
    trainer.initial(4)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_weights_stay_float32_in_mixed_precision(precision: str) -> None:
    trainer = trainer_for(Own(Counting), "cpu", precision)
    vector = trainer.spec.flatten(trainer.initial(0))
    result = trainer.train(vector, {}, EXAMPLES, PLAN, 0)
    plain = trainer_for(Own(Counting)).train(vector, {}, EXAMPLES, PLAN, 0)
    assert result.delta.dtype == np.float32
    assert (digest(result.delta) == digest(plain.delta)) == (precision == "float32")
    np.testing.assert_allclose(result.delta, plain.delta, atol=0.05)


def test_a_float64_model_keeps_its_width() -> None:
    trainer = trainer_for(Own(lambda: torch.nn.Linear(6, 3).double()))
    vector = trainer.spec.flatten(trainer.initial(0))
    assert trainer.train(vector, {}, EXAMPLES, PLAN, 0).delta.dtype == np.float64


@pytest.mark.parametrize(
    ("device", "precision", "text"),
    [
        ("tpu", "auto", "client.device must be auto, cpu, cuda or mps"),
        ("cpu", "float8", "client.precision must be"),
        ("cpu", "float16", "float16 needs a CUDA GPU"),
    ],
)
def test_an_unknown_device_or_precision_is_a_config_error(device: str, precision: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        trainer_for(Own(Counting), device, precision)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"client\.device is 'cuda'"):
        trainer_for(Own(Counting), "cuda")
    assert trainer_for(Own(Counting), "auto").spec.size > 0


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: [1, 2], "returned list: .*a forest of trees, .* no model here"),
        (torch.nn.ReLU, "nothing to learn"),
        (lambda: {"n": np.zeros(2, np.int64)}, "nothing to learn"),
        (lambda: torch.nn.Linear(2, 2).bfloat16(), "'weight' is bfloat16"),
        (lambda: torch.nn.LazyLinear(2), "'weight' of its model has no shape yet"),
        (
            lambda: dict(torch.nn.Linear(2, 2).named_parameters()),
            r"Own: model\(\) has at 'weight' a Parameter of torch's .* return the module itself, or, for a",
        ),
        (lambda: {"a": [[1.0, 2.0], [3.0]]}, "has at 'a' a list that is no array: setting .*; give numpy"),
    ],
)
def test_a_model_that_cannot_be_trained_is_an_app_error(made: Any, text: str) -> None:
    with pytest.raises(AppError, match=text):
        trainer_for(Own(made))


def test_a_model_that_names_its_tensors_anew_each_time_is_an_app_error() -> None:
    counts = iter(range(9))
    trainer = trainer_for(Own(lambda: torch.nn.ModuleDict({f"dense_{next(counts)}": torch.nn.Linear(6, 3)})))
    with pytest.raises(AppError, match=r"same each time.*: dense_\d.bias, .*a name of your own"):
        trainer.initial(1)


def test_a_trainer_keeps_no_copy_of_the_first_weights() -> None:
    trainer_for(Own(lambda: torch.nn.Linear(6, 3)))  # what is imported for the first of them
    tracemalloc.start()
    trainer = trainer_for(Own(lambda: torch.nn.Linear(1000, 1000)))
    kept, _ = tracemalloc.get_traced_memory()  # of numpy's arrays, not of torch's tensors
    tracemalloc.stop()
    assert kept < trainer.spec.size


def test_the_contract_of_train_and_evaluate() -> None:
    trainer = trainer_for(Own(Counting, lambda model: "done"))
    vector = trainer.spec.flatten(trainer.initial(0))
    with pytest.raises(AppError, match="train returned a str: return a dict of metrics"):
        trainer.train(vector, {}, EXAMPLES, PLAN, 0)
    with pytest.raises(ManifestMismatch, match=r"vector has shape \(3,\)"):
        trainer.train(vector[:3], {}, EXAMPLES, PLAN, 0)
    plain = trainer_for(Own(lambda: {"w": np.zeros(3, np.float32)}))
    with pytest.raises(AppError, match="needs train and evaluate of its own"):
        plain.train(np.zeros(3, np.float32), {}, EXAMPLES, PLAN, 0)
    with pytest.raises(AppError, match="needs train and evaluate of its own"):
        plain.evaluate(np.zeros(3, np.float32), {}, EXAMPLES)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda model: model.add_module("more", torch.nn.Linear(2, 2)), r"more\.bias, more\.weight"),
        (lambda model: delattr(model, "out"), r"out\.bias, out\.weight"),
    ],
    ids=["more", "fewer"],
)
def test_training_that_changes_which_tensors_there_are_is_an_app_error(change: Any, changed: str) -> None:
    def trained(model: Any) -> dict[str, float]:
        change(model)
        return {}

    trainer = trainer_for(Own(Counting, trained))
    with pytest.raises(AppError, match=changed):
        trainer.train(trainer.spec.flatten(trainer.initial(0)), {}, EXAMPLES, PLAN, 0)


class Leaves(Own):
    """Trains as the default does, and leaves the model in another form than it was given in."""

    def __init__(self, left: Any) -> None:
        super().__init__(Widened)
        self._left = left

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> Any:
        found = App.train(self, model, examples, plan, seed)
        self._left(model)
        return found


@pytest.mark.parametrize(
    "left",
    [lambda model: model.double(), lambda model: model.hidden.requires_grad_(False)],
    ids=["in another precision", "frozen"],
)
def test_the_form_in_which_a_training_leaves_the_model_is_not_carried_over(left: Any) -> None:
    trainer, plain = trainer_for(Leaves(left)), trainer_for(Own(Widened))
    vector = trainer.spec.flatten(trainer.initial(0))
    first = trainer.train(vector, {}, EXAMPLES, PLAN, 0)
    hidden = tensor_set(trainer.spec, [0, 1])
    assert trainer.step_cost(hidden, EXAMPLES) == plain.step_cost(hidden, EXAMPLES)
    trainer.train(vector, {}, EXAMPLES, PLAN, 0)
    measured = trainer.evaluate(vector, {}, EXAMPLES)
    assert digest(first.delta) == digest(trainer.train(vector, {}, EXAMPLES, PLAN, 0).delta)
    assert digest(first.delta) == digest(plain.train(vector, {}, EXAMPLES, PLAN, 0).delta)
    assert measured == plain.evaluate(vector, {}, EXAMPLES)


def test_training_that_leaves_no_values_is_an_app_error_and_no_more() -> None:
    trainer, plain = trainer_for(Leaves(lambda model: model.to("meta"))), trainer_for(Own(Widened))
    vector = trainer.spec.flatten(trainer.initial(0))
    for _ in range(2):
        with pytest.raises(AppError, match=r"^Leaves\.train: it left 'hidden\.weight' on the meta device"):
            trainer.train(vector, {}, EXAMPLES, PLAN, 0)
        assert trainer.evaluate(vector, {}, EXAMPLES) == plain.evaluate(vector, {}, EXAMPLES)


def weighing(*shape: int) -> Any:
    """Puts other weights in the place of a layer's."""

    def change(model: Any) -> None:
        model.weight = torch.nn.Parameter(torch.zeros(*shape))

    return change


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (weighing(6, 3), "it changed the shape of 'weight' from (3, 6) to (6, 3)"),
        (weighing(5, 6), "it changed the shape of 'weight' from (3, 6) to (5, 6)"),
        (
            lambda model: model.register_buffer("more", torch.zeros(2)),
            "it changed which tensors the model has (more): they must stay those that `model` returned",
        ),
    ],
    ids=["turned", "larger", "more"],
)
def test_training_that_leaves_another_model_is_an_error_of_its_app_and_device(left: Any, said: str) -> None:
    """Also where it has as many numbers: in another order they would be another model's."""
    trainer = trainer_for(Own(lambda: torch.nn.Linear(6, 3), left))
    vector = trainer.spec.flatten(trainer.initial(0))
    with on_device("device-0007"), pytest.raises(AppError) as error:
        trainer.train(vector, {}, EXAMPLES, PLAN, 0)
    assert str(error.value) == f"Own.train on device-0007: {said}"


def test_an_app_trains_without_a_trainer_too() -> None:
    app = Own(Counting)
    model = app.model()
    assert app.train(model, EXAMPLES, PLAN, 0)["steps"] == 4
    assert 0 <= app.evaluate(model, EXAMPLES)["accuracy"] <= 1


def test_sgd_matches_the_update_written_out() -> None:
    """One step with weight decay, from w0: w1 = w0 - lr (g + wd w0)."""
    trainer = trainer_for(Own(lambda: torch.nn.Linear(6, 3)))
    vector = trainer.spec.flatten(trainer.initial(0))
    plan = LocalPlan(steps=1, batch_size=33, learning_rate=0.5, weight_decay=0.1, proximal_mu=3.0)
    delta = trainer.train(vector, {}, EXAMPLES, plan, 0).delta
    w, b = vector[:18].reshape(3, 6), vector[18:]
    scores = EXAMPLES.x @ w.T + b
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    p[np.arange(33), EXAMPLES.y] -= 1
    gradient = np.concatenate([(p.T @ EXAMPLES.x / 33).ravel(), p.mean(0)])
    np.testing.assert_allclose(delta, -0.5 * (gradient + 0.1 * vector), rtol=1e-4, atol=1e-6)


def test_the_gradient_of_the_synthetic_student() -> None:
    app = Synthetic()
    part = app.data(Shard("train", 0, 500))
    model = {name: a.astype(np.float64) for name, a in app.model(1).items()}
    _, gradient = loss_and_gradient(model, part.x, part.y)
    for name, where in (
        ("hidden.weight", (3, 5)),
        ("hidden.bias", (2,)),
        ("output.weight", (7, 1)),
        ("output.bias", (4,)),
    ):
        sides = []
        for step in (1e-6, -1e-6):
            moved = {n: a.copy() for n, a in model.items()}
            moved[name][where] += step
            sides.append(loss_and_gradient(moved, part.x, part.y)[0])
        assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient[name][where], rel=1e-4, abs=1e-8)


@given(count=st.integers(1, 200), size=st.integers(1, 64), epochs=st.integers(0, 3), steps=st.integers(0, 9))
def test_batches_cover_each_epoch_once(count: int, size: int, epochs: int, steps: int) -> None:
    plan = LocalPlan(epochs=epochs, steps=steps, batch_size=size)
    drawn = list(batches(count, plan, 1))
    assert len(drawn) == planned_steps(plan, count) == (steps or epochs * -(-count // size))
    assert all(1 <= len(rows) <= size for rows in drawn)
    if not steps:
        assert (
            np.bincount(np.concatenate([[], *drawn]).astype(int), minlength=count).tolist()
            == [epochs] * count
        )


@given(count=st.integers(1, 40), size=st.integers(1, 16), steps=st.integers(1, 9))
def test_batches_are_the_parts_of_one_shuffle_for_each_epoch(count: int, size: int, steps: int) -> None:
    """As equal as they can be, the larger ones first; of several trainings each has those of its own seed."""
    plan, per_epoch = LocalPlan(steps=steps, batch_size=size), -(-count // size)
    wanted: list[list[list[int]]] = []
    for seed in (5, 6):
        epochs = range(-(-steps // per_epoch))
        orders = [stream(seed, "shuffle", epoch).permutation(count) for epoch in epochs]
        parts = [part.tolist() for order in orders for part in np.array_split(order, per_epoch)]
        wanted.append(parts[:steps])
        assert [rows.tolist() for rows in batches(count, plan, seed)] == parts[:steps]
    together = DrawnTogether(count, plan, [5, 6])
    assert together.steps == steps
    for step in range(steps):
        assert together.of(step).tolist() == [parts[step] for parts in wanted]


def test_a_batch_size_of_zero_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        planned_steps(LocalPlan(batch_size=0), 10)


PERCEPTRON = (lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)),)


def half(trainer: Trainer, first: int = 0) -> UnitMap:
    """Every second unit of each group."""
    return unit_map(trainer.spec, [range(first, group.size, 2) for group in trainer.spec.groups])


def start(trainer: Trainer) -> Vector:
    return trainer.spec.flatten(trainer.initial(0))


@pytest.mark.parametrize("app", [Own(*PERCEPTRON), Synthetic()], ids=["torch", "numpy"])
def test_a_sub_model_with_all_units_trains_as_the_whole(app: App) -> None:
    trainer, examples = trainer_for(app), app.data(Shard("train"))
    vector = start(trainer)
    chosen = unit_map(trainer.spec, [range(g.size) for g in trainer.spec.groups])
    whole = trainer.train(vector, {}, examples, PLAN, 0)
    found = trainer.train(vector[chosen.indices], {}, examples, PLAN, 0, submodel=chosen)
    assert digest(found.delta) == digest(whole.delta)
    assert found.metrics == whole.metrics
    assert trainer.step_cost(chosen, examples) == 1.0


def test_a_step_of_a_sub_model_is_that_of_the_smaller_module() -> None:
    trainer = trainer_for(Own(*PERCEPTRON))
    chosen, plan = half(trainer), LocalPlan(steps=1, batch_size=33, learning_rate=0.5)
    part = start(trainer)[chosen.indices]
    result = trainer.train(part, {}, EXAMPLES, plan, 0, submodel=chosen)
    small = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    torch.nn.utils.vector_to_parameters(torch.from_numpy(part.copy()), small.parameters())
    x, y = torch.from_numpy(EXAMPLES.x).float(), torch.from_numpy(EXAMPLES.y).long()
    torch.nn.functional.cross_entropy(small(x), y).backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in small.parameters() if p.grad is not None])
    np.testing.assert_allclose(result.delta, -0.5 * gradient.numpy(), rtol=1e-4, atol=1e-6)
    assert result.delta.shape == (chosen.size,) == (6 * 4 + 4 + 4 * 3 + 3,)
    assert result.steps == 1


def test_a_sub_model_trains_as_the_whole_with_its_other_units_unread() -> None:
    """The numpy App: reading no dropped unit, the whole model learns the same on the kept coordinates."""
    app = Synthetic()
    trainer, examples = trainer_for(app), app.data(Shard("train", 0, 40))
    chosen, plan = half(trainer, first=1), LocalPlan(steps=1, batch_size=32, learning_rate=0.1)
    vector = start(trainer)
    found = trainer.train(vector[chosen.indices], {}, examples, plan, 3, submodel=chosen).delta
    unread = trainer.spec.unflatten(vector)
    unread["output.weight"][::2] = 0.0
    whole = trainer.train(trainer.spec.flatten(unread), {}, examples, plan, 3).delta
    np.testing.assert_allclose(found, whole[chosen.indices], rtol=1e-4, atol=1e-7)
    assert found.shape == (chosen.size,)


def test_tasks_of_sub_models_leave_nothing_behind() -> None:
    """Other units, other sizes, the whole model and its hidden buffers: no order of tasks matters."""
    trainer = trainer_for(Own(Widened))
    vector = start(trainer)
    vector.setflags(write=False)
    maps = [half(trainer), half(trainer, first=1), unit_map(trainer.spec, [[0, 1, 2]] * 2)]
    maps.append(unit_map(trainer.spec, [[5], [1]]))

    def trained(chosen: UnitMap | None) -> str:
        given = vector if chosen is None else vector[chosen.indices]
        return digest(trainer.train(given, {}, EXAMPLES, PLAN, 0, submodel=chosen).delta)

    first = {chosen: trained(chosen) for chosen in (None, *maps)}
    assert len(set(first.values())) == 5
    costs = [trainer.step_cost(chosen, EXAMPLES) for chosen in maps]
    for chosen in (*reversed(maps), None, *maps):
        assert trained(chosen) == first[chosen]
    fresh = trainer_for(Own(Widened))
    assert (
        digest(fresh.train(vector[maps[0].indices], {}, EXAMPLES, PLAN, 0, maps[0]).delta) == first[maps[0]]
    )
    assert [fresh.step_cost(chosen, EXAMPLES) for chosen in maps] == costs
    assert costs[0] == costs[1] > costs[2] > costs[3] > 0


class Widened(torch.nn.Module):
    """Hidden units before a model with norm, dropout and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.back, self.counting = torch.nn.Linear(6, 10), torch.nn.Linear(10, 6), Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.counting(self.back(torch.relu(self.hidden(x.flatten(1)))))
        return scores


class Recurrent(torch.nn.Module):
    """A recurrent layer, whose products torch does not count, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = torch.nn.LSTM(6, 4), torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.layer(x[None])[0][0])
        return scores


def test_the_cost_of_a_step_counts_operations_or_else_parameters() -> None:
    perceptron = trainer_for(Own(*PERCEPTRON))
    # Of 6-8-3, no gradient of the input is taken: 2 (6 h) + 3 (3 h) multiplications for h hidden units.
    assert perceptron.step_cost(half(perceptron), EXAMPLES) == pytest.approx(0.5)
    recurrent = trainer_for(Own(Recurrent))
    head = tensor_set(recurrent.spec, [4, 5])
    assert recurrent.step_cost(head, EXAMPLES) == head.size / recurrent.spec.size == 15 / (16 * 12 + 15)
    app = Synthetic()
    numpy = trainer_for(app)
    chosen = half(numpy)
    assert numpy.step_cost(chosen, app.data(Shard("test"))) == chosen.size / numpy.spec.size


class Reversing(torch.nn.Module):
    """Branches on what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        scores: torch.Tensor = self.out(hidden if hidden.sum() > 0 else -hidden)
        return scores


class Declared(Own):
    """Says which units there are."""

    def units(self, model: Any) -> Any:
        members = [Member("first.weight", 0), Member("first.bias", 0), Member("out.weight", 1)]
        return [UnitGroup("mine", model.first.out_features, tuple(members))]


def test_units_may_be_declared() -> None:
    trainer = trainer_for(Own(Reversing))
    assert trainer.spec.groups == ()
    assert "control flow" in trainer.whole_because
    assert "model of numpy arrays needs units" in trainer_for(Own(lambda: {"w": np.zeros(3)})).whole_because
    assert "every layer of the model" in trainer_for(Own(lambda: torch.nn.Linear(6, 3))).whole_because
    declared = trainer_for(Declared(Reversing))
    assert [(g.name, g.size) for g in declared.spec.groups] == [("mine", 4)]
    assert declared.whole_because == ""
    chosen = half(declared)
    result = declared.train(start(declared)[chosen.indices], {}, EXAMPLES, PLAN, 0, submodel=chosen)
    assert result.delta.shape == (chosen.size,)
    with pytest.raises(AppError, match=r"'first\.weight' is 8 long"):
        trainer_for(Declared(lambda: wider(Reversing())))


def wider(module: Any) -> Any:
    """Its weights do not fit what it says."""
    module.first.weight = torch.nn.Parameter(torch.zeros(8, 6))
    return module


def test_a_sub_model_of_another_model_is_refused() -> None:
    trainer, other = trainer_for(Own(*PERCEPTRON)), trainer_for(Declared(Reversing))
    chosen = half(other)
    for call in (
        lambda: trainer.train(start(other)[chosen.indices], {}, EXAMPLES, PLAN, 0, submodel=chosen),
        lambda: trainer.step_cost(chosen, EXAMPLES),
    ):
        with pytest.raises(ManifestMismatch, match="of a model with other tensors"):
            call()
    with pytest.raises(ManifestMismatch, match="vector has shape"):
        trainer.train(start(trainer), {}, EXAMPLES, PLAN, 0, submodel=half(trainer))
