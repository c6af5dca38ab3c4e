"""What a traced program sends, counted: kinds, times, bytes, names; and what cannot be counted is refused."""

import jax
import jax.numpy as jnp
import pytest
from helpers import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig, wire

pytestmark = pytest.mark.quick
X = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)


def counted(f, **sizes):
    sizes = sizes or {"tp": 4}
    f = jax.shard_map(f, mesh=mesh_of(**sizes), in_specs=P("tp"), out_specs=P(), check_vma=False)
    return wire.collectives(jax.jit(f), X)


@pytest.mark.parametrize(
    ("send", "kind", "share"),
    [
        (lambda x: lax.psum(x, "tp"), "all_reduce", 2 * 3 / 4),
        (lambda x: lax.pmax(x, "tp"), "all_reduce", 2 * 3 / 4),
        (lambda x: lax.all_gather(x, "tp"), "all_gather", 3),
        (lambda x: lax.all_to_all(x, "tp", 1, 0, tiled=True), "all_to_all", 3 / 4),
        (lambda x: lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True), "reduce_scatter", 3 / 4),
        (lambda x: lax.ppermute(x, "tp", [(0, 1), (1, 0)]), "permute", 1),
    ],
)
def test_each_kind_sends_what_its_ring_sends(send, kind, share):
    (found,) = counted(send)
    assert (found.kind, found.ranks, found.shape, found.dtype, found.times) == (kind, 4, (2, 64), "bfloat16", 1)
    assert found.values_sent == 128 * share and found.bytes_sent == 256 * share


def test_a_scan_s_collectives_count_as_often_as_it_runs_them_and_keep_the_names_around_them():
    def inner(carry, _):
        with jax.named_scope("inner"):
            return lax.psum(carry, "tp"), None

    def outer(carry, _):
        with jax.named_scope("outer"):
            return lax.scan(inner, carry, None, length=3)[0], None

    (found,) = counted(lambda x: lax.scan(outer, x, None, length=5)[0])
    assert found.times == 15 and found.name == "outer/inner"


def test_branches_that_send_the_same_under_other_names_count_once_and_others_are_refused():
    def branch(name, send):
        def run(x):
            with jax.named_scope(name):
                return send(x)

        return run

    def both(one, other):
        return counted(lambda x: lax.cond(x[0, 0] > 0, branch("a", one), branch("b", other), x))

    assert len(both(lambda x: lax.psum(x, "tp"), lambda x: lax.psum(2 * x, "tp"))) == 1
    with pytest.raises(ValueError, match="branches differ"):
        both(lambda x: lax.psum(x, "tp"), lambda x: x)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="unknown trip count"):
        counted(lambda x: lax.while_loop(lambda v: v[0, 0] < 9, lambda v: lax.psum(v, "tp"), x))
    with pytest.raises(ValueError, match="groups of an axis"):
        counted(lambda x: lax.psum(x, "tp", axis_index_groups=[[0, 1], [2, 3]]))


def test_the_axes_of_a_sum_are_told_apart():
    found = counted(lambda x: lax.psum(lax.psum(x, "tp"), ("dp", "tp")), dp=2, tp=4)
    assert [c.ranks for c in found] == [4, 8]
    assert len(wire.over_axis(found, "tp")) == 2 and len(wire.over_axis(found, "dp")) == 1


def test_the_report_names_each_sum_its_grouping_and_its_bytes():
    config = EchoConfig(algorithm="two_shot", feedback=False, group_size=32)

    def program(x):
        return echo_jax.echo_psum(x, "tp", None, config, name="mlp_out")[0] + lax.psum(x, "tp")

    f = jax.shard_map(program, mesh=mesh_of(tp=4), in_specs=P("tp"), out_specs=P())
    lines = wire.report(f, X).splitlines()
    # 2 rows of 64: 4 groups of 32, one a rank: 16 bytes of codes, and a line of scales.
    assert lines[1].split() == ["mlp_out/rows32/all_to_all", "all_to_all", "tp", "uint8[4,2,16]", "1", "96"]
    assert lines[2].split() == ["mlp_out/rows32/all_gather", "all_gather", "tp", "uint8[2,16]", "1", "96"]
    assert lines[3].split() == ["all_reduce", "tp", "bfloat16[2,64]", "1", "384"]
    assert lines[-1].split() == ["all", "3", "576"]


def test_bits_effective_of_lax_psum_are_its_dtype_s_and_of_no_sum_not_a_number():
    found = counted(lambda x: lax.psum(x, "tp"))
    assert wire.bits_effective(sum(c.bytes_sent for c in found), found) == 16
    one = counted(lambda x: lax.psum(x, "tp"), tp=1)
    assert str(wire.bits_effective(sum(c.bytes_sent for c in one), one)) == "nan"
