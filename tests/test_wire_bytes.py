"""Promise 11: what a call sends, counted in the compiled program: two collectives, one uint8 buffer each."""

import jax
import numpy as np
import pytest
from helpers import mesh_of
from hlo import collectives
from jax import lax
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig
from echo_jax.codecs import CODECS

RANKS = 4


def _compiled(config, shape, dtype="float32", ranks=RANKS, name=None, calls=1):
    def run(x):
        state = echo_jax.init_state(x, "tp", config)
        for _ in range(calls):
            x, state = echo_jax.echo_psum(x, "tp", state, config, name=name)
        return x, state

    sums = jax.shard_map(run, mesh=mesh_of(tp=ranks), in_specs=P(), out_specs=(P(), P("tp")))
    return jax.jit(sums).lower(jax.ShapeDtypeStruct(shape, dtype)).compile()


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("codec", "bits"), [("hadamard_int4", 4.125), ("int4", 4.125), ("int8", 8.125)])
def test_a_call_is_two_collectives_of_bytes_and_sends_four_and_an_eighth_bits_a_value(codec, bits, dtype):
    sent = collectives(_compiled(EchoConfig(codec, algorithm="two_shot"), (16, 1024), dtype))
    assert sorted(c.op for c in sent) == ["all-gather", "all-to-all"]
    for collective in sent:
        assert collective.dtypes == {"u8"}
        assert collective.groups == ((0, 1, 2, 3),)
        # Both move a buffer of every value's bits past each rank: 1/n of it is the rank's own and does not travel.
        assert collective.nbytes * 8 == bits * 16 * 1024


@pytest.mark.parametrize(
    ("shape", "group_size", "used_group", "groups_a_chunk"),
    [
        ((16, 1024), 32, 32, 128),
        ((1,), 128, 128, 1),  # one value: every chunk is a group
        ((5, 33), 128, 128, 1),  # 165 values, flat, 4 chunks of 128
        ((3, 96), 128, 32, 3),  # 9 groups of 32 in 4 chunks of 3
        ((1030,), 128, 128, 3),  # flat: 8.05 groups in 4 chunks of 3
    ],
)
def test_what_is_sent_beyond_that_is_padding_to_whole_groups_and_lines_of_16_bytes(
    shape, group_size, used_group, groups_a_chunk
):
    sent = collectives(_compiled(EchoConfig("hadamard_int4", group_size, algorithm="two_shot"), shape))
    scales = -(-2 * groups_a_chunk // 16) * 16
    wanted = RANKS * (groups_a_chunk * used_group // 2 + scales)
    assert [(c.dtypes, c.nbytes) for c in sent] == [({"u8"}, wanted)] * 2


@pytest.mark.parametrize("codec", CODECS)
def test_one_shot_is_one_collective_of_bytes(codec):
    (sent,) = collectives(_compiled(EchoConfig(codec, algorithm="one_shot"), (8, 512), "bfloat16"))
    bits = CODECS[codec].bits(128, "bfloat16")
    assert (sent.op, sent.dtypes, sent.nbytes * 8) == ("all-gather", {"u8"}, RANKS * bits * 8 * 512)


def test_the_code_none_sends_the_values_in_their_own_dtype():
    sent = collectives(_compiled(EchoConfig("none", algorithm="two_shot"), (2, 512), "bfloat16"))
    assert [(c.dtypes, c.nbytes) for c in sent] == [({"u8"}, 2 * 512 * 2)] * 2


@pytest.mark.parametrize(
    "config", [EchoConfig(algorithm="exact"), EchoConfig(min_elements=1025)], ids=["exact", "gate"]
)
def test_an_exact_call_is_one_all_reduce(config):
    (sent,) = collectives(_compiled(config, (2, 512)))
    assert (sent.op, sent.dtypes, sent.nbytes) == ("all-reduce", {"f32"}, 4 * 2 * 512)


def test_the_gate_opens_at_min_elements():
    sent = collectives(_compiled(EchoConfig(min_elements=1024), (2, 512)))
    assert [c.dtypes for c in sent] == [{"u8"}] * 2


def test_one_rank_sends_nothing():
    compiled = _compiled(EchoConfig(algorithm="two_shot"), (2, 512), ranks=1)
    assert all(len(group) == 1 for c in collectives(compiled) for group in c.groups)


def test_calls_in_a_row_are_two_collectives_each():
    sent = collectives(_compiled(EchoConfig(algorithm="two_shot"), (2, 512), calls=3))
    assert len(sent) == 6 and all(c.dtypes == {"u8"} for c in sent)


def test_a_backward_sum_is_two_collectives_of_bytes_and_the_forward_pass_of_it_none():
    config = EchoConfig(algorithm="two_shot", feedback=False)

    def loss(x, w):
        x, _ = echo_jax.echo_psum_grad(x, "tp", None, config)
        return lax.psum((x * w).sum(), "tp")

    def compiled(f, out_specs):
        sharded = jax.shard_map(f, mesh=mesh_of(tp=RANKS), in_specs=(P(), P("tp")), out_specs=out_specs)
        shapes = jax.ShapeDtypeStruct((8, 512), "float32"), jax.ShapeDtypeStruct((4 * 8, 512), "float32")
        return collectives(jax.jit(sharded).lower(*shapes).compile())

    assert [c.nbytes for c in compiled(loss, P())] == [4]  # the loss itself
    gradient = [c for c in compiled(jax.grad(loss), P()) if c.nbytes > 4]
    assert [(c.dtypes, c.nbytes * 8) for c in gradient] == [({"u8"}, 4.125 * 8 * 512)] * 2


@pytest.mark.quick
def test_a_call_carries_its_name_into_the_compiled_program():
    named = collectives(_compiled(EchoConfig(algorithm="two_shot"), (2, 512), name="mlp_out"))
    unnamed = collectives(_compiled(EchoConfig(algorithm="two_shot"), (2, 512)))
    assert len(named) == len(unnamed) == 2
    assert all("/mlp_out/" in c.name and "echo_psum" not in c.name for c in named)
    assert all("/echo_psum/" in c.name for c in unnamed)


def test_a_mesh_of_several_axes_is_summed_over_the_named_ones_only():
    config = EchoConfig(algorithm="two_shot", feedback=False)
    mesh = mesh_of(data=2, tp=4)
    sums = jax.shard_map(
        lambda x: echo_jax.echo_psum(x, "tp", None, config)[0], mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    sent = collectives(jax.jit(sums).lower(jax.ShapeDtypeStruct((2, 512), np.float32)).compile())
    assert [c.groups for c in sent] == [((0, 1, 2, 3), (4, 5, 6, 7))] * 2
