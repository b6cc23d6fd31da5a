"""What every architecture declares is what its modules are, by every objective that suits, for every task."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from finetuning.model.heads import TaskModel
from pretraining.architectures.declaration import architectures, find_architecture, list_sizes
from pretraining.architectures.weights import KINDS, Kind, TaskHead, Weight, count_products
from pretraining.config.settings import list_divisors
from pretraining.huggingface.weights import export_weights, import_weights, list_weights
from pretraining.model.shape import PIECE_HEAD, Learning, Shape
from pretraining.objectives.declaration import build_model, find_objective, num_parameters, objectives


def test_sizes_are_listed_from_the_smallest_on() -> None:
    sizes = architectures()["bert"].sizes
    assert [name for name in list_sizes() if name in sizes] == list(sizes)


SMALL = {"layers": 3, "hidden": 64, "heads": 2, "intermediate": 96, "positions": 40}


def list_learnings(name: str) -> list[Learning]:
    """Lists what an architecture can learn by: each objective that it can see enough for, with pairs and without."""
    kind, found = architectures()[name], []
    for called, objective in objectives().items():
        shape = make_shape(name)
        exported = objective.exported_heads(shape.change_learning(pairs=False))
        if objective.sees in kind.sees and {*exported} <= kind.heads(shape).keys():
            trains_pairs = objective.uses_pairs and kind.learns_pairs(shape)
            found += [Learning(called, has, objective.sees) for has in (True, False) if trains_pairs or not has]
    return found


def make_shape(name: str, learns: Learning | None = None, **sizes: object) -> Shape:
    """The shape of a model with pieces that are no multiple of anything."""
    settings = architectures()[name].settings_type.model_validate({"architecture": name, **(sizes or SMALL)})
    return settings.shape(997, learns)


LEARNING = [
    pytest.param(name, learns, id=f"{name}-{learns.objective}{'-pairs' * learns.pairs}")
    for name in architectures()
    for learns in list_learnings(name)
]
SIZES = [pytest.param(name, size, id=f"{name}-{size}") for name, kind in architectures().items() for size in kind.sizes]


def assert_declared(model: nn.Module, declared: Sequence[Weight], shape: Shape) -> None:
    """The declared weights are the parameters: names, order and sizes."""
    found = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert found == [(weight.ours, weight.pad_size(shape)) for weight in declared]


@pytest.mark.parametrize(("name", "learns"), LEARNING)
def test_declared_weights_are_the_parameters_of_the_modules(name: str, learns: Learning) -> None:
    shape = make_shape(name, learns)
    kind, objective = find_architecture(name), find_objective(shape)
    with torch.device("meta"):
        model = build_model(shape)
    own = objective.own_weights(shape)
    heads = {head: kind.heads(shape).get(head) or own for head in objective.heads(shape)}
    declared = [*kind.weights(shape), *itertools.chain.from_iterable(heads.values())]
    assert_declared(model, declared, shape)
    assert model.roles() == {weight.ours: weight.role for weight in declared}
    assert num_parameters(shape) == sum(math.prod(weight.size) for weight in declared)
    for weight in declared:
        assert (len(weight.size) == 1) == (weight.role.kind in ("norm", "bias")), weight
        assert weight.size[0] % math.lcm(len(weight.theirs) or 1, weight.role.parts) == 0, weight
    names = [theirs for weight in declared for theirs in weight.theirs]
    assert len(names) == len(set(names))
    if own:
        return  # an objective with an encoder of its own counts its passes
    flops = sum(2 * each.numel() for head in heads for each in model.head(head).parameters() if each.ndim > 1)
    assert objective.flops(shape, 1, 1) == flops + 2 * shape.hidden * shape.vocabulary * (PIECE_HEAD in heads)


@pytest.mark.parametrize(("name", "learns"), LEARNING)
def test_weights_come_back_from_a_folder_as_they_were(name: str, learns: Learning) -> None:
    shape = make_shape(name, learns)
    names = {weight.ours for weight in list_weights(shape)}
    state = {name: each for name, each in build_model(shape).initialize(1).state_dict().items() if name in names}
    read, missing = import_weights(export_weights(state, shape), shape)
    assert not missing
    assert read.keys() == state.keys()
    assert [weight for weight in state if not torch.equal(read[weight], state[weight])] == []


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("name", architectures())
def test_declared_heads_of_tasks_are_those_of_fine_tuned_models(name: str, task: Kind) -> None:
    shape, head = make_shape(name).encoder, TaskHead(task, ("a", "b", "c"))
    with torch.device("meta"):
        model = TaskModel(shape, head)
    kind = find_architecture(name)
    assert_declared(model, [*kind.weights(shape), *kind.task_head(shape, head)], shape)


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_products_are_those_of_the_declared_matrices(name: str, size: str) -> None:
    shape = make_shape(name, size=size)
    kind = find_architecture(name)
    layers = [count_products(kind.layer(shape, number)) for number in range(shape.layers)]
    assert sum(kind.count_products(shape)) == pytest.approx(sum(layers) / shape.layers, rel=1e-12)


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_every_cut_divides_what_it_cuts(name: str, size: str) -> None:
    """For any number of ranks that divides the heads: no rank has half a head, nor inputs that another one computes."""
    shape = make_shape(name, size=size)
    kind = find_architecture(name)
    ranks = math.lcm(*(number for number in list_divisors(shape.heads) if number <= 16))
    assert shape.heads % ranks == 0
    for weights in (kind.layer(shape, number) for number in range(shape.layers)):
        outputs: int | None = None
        for weight in weights:
            if weight.cut == "columns":
                assert weight.size[0] % (weight.role.parts * ranks) == 0, weight
                outputs = weight.size[0] // weight.role.parts
            elif weight.cut == "rows":
                assert weight.size[1] == outputs, f"{weight}: its inputs are cut as the outputs before"
                outputs = None
        assert outputs is None, "what is cut by its outputs is joined again by the next matrix"
    for weight in itertools.chain(kind.weights(shape), *kind.heads(shape).values()):
        assert (weight.cut == "vocabulary") == (weight.rows == "pieces"), weight
        assert weight.cut != "vocabulary" or weight.pad_size(shape)[0] % 64 == 0, weight
