"""Plans of ranks that share a model: memory, sums, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from data_prep.common.errors import UserError
from pretraining.architectures.declaration import architectures, make_shape
from pretraining.architectures.weights import count_parameters
from pretraining.config.overrides import load_recipe
from pretraining.config.settings import Recipe
from pretraining.mesh.cuts import find_crossing
from pretraining.planning.amount import measure_sequences
from pretraining.planning.cost import BUCKET_BYTES, WITHIN, MicroBatch
from pretraining.planning.machines import GPUS, find_network, make_cluster, make_target
from pretraining.planning.memory import count_rank_parameters, pad_vocabulary, plan_activations, plan_memory
from pretraining.planning.plan import build_plan

GPT = make_shape("8b", 50257, "gpt")
CLUSTER = make_cluster(GPUS["v100-32"], "fp16", 4, 8, find_network("edr100x8"))
SAME_RANKS = ((64, 8), (128, 4))


def read(*words: str) -> Recipe:
    return load_recipe(Path("gpt2_8b"), list(words))


@pytest.mark.parametrize("architecture", architectures())
def test_shares_are_of_all_weights_that_are_cut(architecture: str) -> None:
    shape = make_shape("small" if architecture == "gpt" else "base", 1024, architecture)
    alone, shared = count_rank_parameters(shape), count_rank_parameters(shape, 4)
    kind = architectures()[architecture]
    whole = [weight for weight in kind.weights(shape) if weight.cut == "whole"]
    assert alone / 4 < shared < alone / 4 + count_parameters(whole) + 4 * shape.hidden**2


def test_a_vocabulary_is_padded_for_all_shares() -> None:
    assert [pad_vocabulary(GPT, tensor) for tensor in (1, 2, 8)] == [50304, 50432, 51200]


def test_what_norms_and_dropout_read_is_whole_on_all_ranks() -> None:
    """Of a layer of GPT-2 a rank keeps 4 of 16 widths, however many share it."""

    def per_layer(tensor: int) -> float:
        few, many = (replace(GPT, layers=layers) for layers in (2, 12))
        kept = [plan_activations(each, "bf16", 1, 1024, tensor=tensor).kept for each in (few, many)]
        return (kept[1] - kept[0]) / 10 / (2 * 1024 * GPT.hidden)

    assert [per_layer(tensor) for tensor in (1, 2, 8)] == [16, 10, 5.5]


def make_work(tensor: int, recompute: bool = False) -> MicroBatch:
    return MicroBatch.from_average(GPT, "fp16", 8, measure_sequences(GPT, 1024, None), recompute, tensor)


def test_a_layer_has_two_sums_forward_two_backward_and_two_more_if_it_is_computed_again() -> None:
    assert make_work(1, True).sum_seconds(CLUSTER) == 0
    work, again = make_work(8), make_work(8, True)
    assert (work.sums, again.sums) == (4 * 72 + 2, 6 * 72 + 2)
    assert work.sum_bytes == 8 * 1024 * 3072 * 2
    ring = 2 * 7 / 8 * work.sum_bytes / (0.8 * 150e9) + 2 * 7 * WITHIN * max(1, work.sum_bytes / BUCKET_BYTES)
    assert work.sum_seconds(CLUSTER) == pytest.approx(work.sums * ring)
    assert work.flops == pytest.approx(make_work(1).flops / 8)


def test_ranks_with_other_parts_share_the_ports_of_a_node() -> None:
    own = CLUSTER.select_data_ranks(4)
    assert (own.nodes, own.per_node) == (4, 2)
    assert own.network.bandwidth == 25e9
    beyond = CLUSTER.select_data_ranks(16)
    assert (beyond.nodes, beyond.per_node) == (2, 1)
    assert (CLUSTER.select_tensor_ranks(16).nodes, CLUSTER.select_tensor_ranks(16).per_node) == (2, 8)


def test_a_mesh_needs_a_share_of_the_memory() -> None:
    alone, shared = plan_memory(GPT, "fp16", 64, 1), plan_memory(GPT, "fp16", 64, 1, tensor=8)
    assert shared.device == pytest.approx(alone.device * count_rank_parameters(GPT, 8) / count_rank_parameters(GPT))
    listed = [memory.zero for memory in build_plan(make_target(read(), None, "v100-32", 8, 8)).memories]
    assert listed == [1, 2], "ranks that share a model take no ZeRO 3"


def test_a_mesh_across_nodes_is_refused_unless_asked_for() -> None:
    assert find_crossing(4, 8) is find_crossing(1, 3) is None
    with pytest.raises(UserError, match=r"does not divide the 4 ranks of a node.*parallel\.across_nodes"):
        make_target(read(), None, "v100-32", 8, 4)
    asked = read("--parallel.across_nodes", "true")
    steps = [build_plan(make_target(asked, None, "v100-32", *nodes, "100gbe")).phases[0].step for nodes in SAME_RANKS]
    within, across = [step.sums for step in steps if step]
    assert across > 2 * within
    assert "take a divisor, or a multiple" in (find_crossing(6, 4, across_nodes=True) or "")
