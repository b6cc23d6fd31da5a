"""The model of a step's time: what more of anything may do to it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.architectures.declaration import make_shape
from pretraining.model.shape import Shape
from pretraining.objectives.costs import Pass
from pretraining.objectives.declaration import count_computed_flops, count_step_flops, objectives
from pretraining.optimizers.declaration import optimizers
from pretraining.planning.amount import measure_sequences
from pretraining.planning.cost import Cluster, MicroBatch, StepTraffic, estimate_step, find_efficiency
from pretraining.planning.machines import GPUS, find_network, make_cluster
from pretraining.planning.memory import count_rank_parameters, plan_activations

names = st.sampled_from(sorted(GPUS))
kinds = st.sampled_from(["10gbe", "100gbe", "edr100x4", "hdr200", "hdr200x8", "ndr400x8"])
stages = st.integers(0, 3)
powers = st.sampled_from([1, 2, 4, 8, 16, 64])


def cluster(name: str = "a100-80", nodes: int = 4, per_node: int = 8, network: str = "hdr200x8") -> Cluster:
    return make_cluster(GPUS[name], "fp16", nodes, per_node, find_network(network))


def work(size: str = "large", length: int = 128, sequences: int = 64) -> MicroBatch:
    shape = make_shape(size, 30522)
    return MicroBatch.from_average(shape, "bf16", sequences, measure_sequences(shape, length, None))


def sharing(zero: int = 1, size: str = "large", dtype: Any = "bf16") -> StepTraffic:
    count = count_rank_parameters(make_shape(size, 30522))
    return StepTraffic.for_stage(count, zero, dtype, optimizers()["lamb"].traffic)


@settings(max_examples=40)
@given(names, kinds, stages, powers, powers, st.floats(1.0, 10.0))
def test_faster_parts_help(name: str, network: str, zero: int, nodes: int, accumulation: int, times: float) -> None:
    before = cluster(name, nodes, 8, network)
    seconds = estimate_step(before, work(), sharing(zero), accumulation).total
    joined = before.network
    faster = [
        replace(before, link=times * before.link),
        replace(before, network=joined._replace(bandwidth=times * joined.bandwidth)),
        replace(before, network=joined._replace(latency=joined.latency / times)),
        replace(before, products=times * before.products),
        replace(before, memory_bandwidth=times * before.memory_bandwidth),
        replace(before, launch=before.launch / times),
        replace(before, jitter=before.jitter / times),
    ]
    for other in faster:
        assert estimate_step(other, work(), sharing(zero), accumulation).total <= seconds * (1 + 1e-9)


@settings(max_examples=40)
@given(names, kinds, stages, powers, powers, st.sampled_from(sorted(BERT.sizes)))
def test_a_rank_among_others_gets_no_more_done_than_alone(
    name: str, network: str, zero: int, nodes: int, accumulation: int, size: str
) -> None:
    found = find_efficiency(cluster(name, nodes, 8, network), work(size), sharing(zero, size), accumulation)
    assert 0 < found <= 1 + 1e-9


@settings(max_examples=40)
@given(names, kinds, stages, powers, st.integers(0, 6))
def test_more_nodes_make_longer_steps(name: str, network: str, zero: int, accumulation: int, power: int) -> None:
    few, many = (cluster(name, 2**nodes, 8, network) for nodes in (power, power + 1))
    given = work(), sharing(zero)
    assert many.scatter_seconds(1e9) >= few.scatter_seconds(1e9)
    once, twice = (estimate_step(few, *given, number * accumulation).total for number in (1, 2))
    assert twice >= once
    assert find_efficiency(many, *given, accumulation) <= find_efficiency(few, *given, 2 * accumulation) + 1e-9


def test_joining_is_a_ring_within_a_node_and_between_nodes() -> None:
    """4 nodes of 8 with 300 GB/s and 200 GB/s a node, of which 80% are reached: 7/8 of it in a node, 3/4 between."""
    size = 1e12  # so that latency is little
    expected = 7 / 8 * size / (0.8 * 300e9) + 3 / 4 * size / (0.8 * 200e9)
    assert cluster().scatter_seconds(size) == pytest.approx(expected, rel=0.2)
    assert cluster(nodes=1, per_node=1).scatter_seconds(size) == 0


def test_what_is_joined_under_the_stages() -> None:
    """ZeRO 2 joins every micro-batch, ZeRO 3 gathers the weights besides, and nothing is hidden in fp16 below it."""
    fast = replace(cluster(), launch=0.0)  # no time in which much could hide
    times = {zero: estimate_step(fast, work(sequences=8), sharing(zero), 16).joining for zero in range(4)}
    assert times[0] == times[1] < times[2] < times[3]
    in_fp16, in_bf16 = (
        estimate_step(cluster(), work(), sharing(1, dtype=dtype), 4).joining for dtype in ("fp16", "bf16")
    )
    assert in_fp16 > in_bf16
    assert estimate_step(cluster(nodes=1, per_node=1), work(), sharing(3), 4).joining == 0


def test_the_host_limits_small_micro_batches_on_a_gpu() -> None:
    fast = cluster("h100-80")
    small, large = work("base", sequences=1), work("base", sequences=512)
    assert small.seconds(fast) == 12 * fast.launch
    assert large.seconds(fast) > 12 * fast.launch


def test_recomputed_activations_cost_a_third_more() -> None:
    shape = make_shape("large", 30522)
    statistics = measure_sequences(shape, 512, None)
    kept, again = (MicroBatch.from_average(shape, "bf16", 64, statistics, recompute) for recompute in (False, True))
    assert again.seconds(cluster()) == pytest.approx(4 / 3 * kept.seconds(cluster()))


def test_a_pass_of_a_share_of_the_sequences_costs_this_share(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = make_shape("tiny", 1000).change_learning(pairs=False)

    def halves(_: Any, shape: Shape, sequences: int, pieces: float, predictions: float) -> list[Pass]:
        return 2 * [Pass(shape, predictions / 2, share=0.5)]

    def measure() -> tuple[list[float], float]:
        planned = plan_activations(shape, "bf16", 8, 64, predictions=10)
        batch = MicroBatch.from_average(shape, "bf16", 8, measure_sequences(shape, 64, None))
        flops = [count(shape, [64] * 8, 80) for count in (count_computed_flops, count_step_flops)]
        return [planned.kept, batch.traffic, *flops], batch.layers

    whole, layers = measure()
    monkeypatch.setattr(type(objectives()["mlm"]), "passes", halves)
    found = measure()
    assert found[0] == pytest.approx(whole)
    assert found[1] == 2 * layers
