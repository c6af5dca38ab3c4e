"""The codes of others: levels and scales as published, the stated bounds and bits; and the benchmark of speed."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import KINDS, partials

from benchmarks import codec_speed, peer_codes, quality
from benchmarks.peer_codes import PEERS
from echo_jax import EchoConfig, stages
from echo_jax.codecs import CODECS

ROOT = Path(peer_codes.__file__).parents[1]
SHAPE = 1, 512, 64
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# The least magnitude for which a group's bound holds, where the chunk's largest is 1: from the comments in the table.
LEAST = {"quickreduce_q4": 2.0**-11, "nvfp4": 1.001 / 28672}


@functools.cache
def _compiled(code):
    """float32[..., G, g] -> (values after a round trip, codes, scales, bytes)."""

    def run(v):
        wire = PEERS[code].encode(v, "float32")
        codes, scales = PEERS[code].decode(wire, *v.shape[-2:], "float32")
        return codes * scales, codes, scales, wire

    return jax.jit(run)


def _round_trip(code, v):
    return tuple(np.asarray(part) for part in _compiled(code)(v))


def _groups(kind):
    """float32[1, 512, 64], of largest magnitude 1."""
    if kind != "boundary":
        return partials(1, SHAPE, kind)
    # Largest magnitudes over two binades, on both sides of zero, and just below a power of two, at it and above; what
    # lies just below the middle of two levels; and values spread over all others.
    top = np.concatenate([np.linspace(0.25, 1, 509), np.nextafter(np.float32(0.5), np.float32([0, 0.5, 1]))])
    v = np.linspace(-1, 1, SHAPE[-1]) * top[:, None]
    v[:, 1], v[:, 2], v[:, 3], v[::2, 0] = top, top * 0.999 * 5 / 6, top * 0.999 * 432 / 448, 0
    return np.float32(v)[None]


@pytest.mark.parametrize("kind", [*KINDS, "boundary"])
@pytest.mark.parametrize("code", PEERS)
def test_a_round_trip_is_off_by_at_most_the_stated_bound(code, kind):
    v = _groups(kind)
    rounded, _, scales, _ = _round_trip(code, v)
    largest = np.abs(np.float64(v)).max(-1, keepdims=True)
    held = (largest >= LEAST.get(code, 0))[..., 0]
    error = np.abs(np.float64(v) - rounded)
    assert held.any() or kind == "zero"
    assert (error <= (PEERS[code].error_bound("float32") + 4 * 2.0**-24) * largest)[held].all()
    assert scales.shape == v.shape
    if kind == "zero":
        assert not rounded.any()
    if kind == "boundary":  # a bound that nothing comes near would say little
        assert (error / largest).max() > 0.9 * PEERS[code].error_bound("float32")


@pytest.mark.parametrize("code", sorted(PEERS.keys() - LEAST.keys()))
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales_with_the_exponents_of_float32_hold_the_bound_at_any_magnitude(code, scale):
    v = partials(2, SHAPE)
    v[:, ::2] *= np.float32(scale)
    error = np.abs(np.float64(v) - _round_trip(code, v)[0])
    largest = np.abs(np.float64(v)).max(-1, keepdims=True)
    assert (error <= (PEERS[code].error_bound("float32") + 4 * 2.0**-24) * largest).all()


@pytest.mark.parametrize(
    ("code", "g", "bits"),
    [
        ("quickreduce_q4", 32, 4.5),
        ("quickreduce_q4", 128, 4.5),
        ("block_fp8", 128, 8.25),
        ("block_fp8", 64, 8.5),
        ("mxfp4", 32, 4.25),
        ("mxfp4", 64, 4.25),
        ("nvfp4", 32, 4.5),
        ("nvfp4", 128, 4.5),
        ("fp4_e2m1", 32, 4.5),
        ("fp4_e2m1", 128, 4.125),
    ],
)
def test_declared_bits_are_those_on_the_wire(code, g, bits):
    groups = 256
    assert PEERS[code].bits(g, "float32") == bits
    nbytes = PEERS[code].nbytes(groups, g, "float32")
    wire = jax.eval_shape(lambda v: PEERS[code].encode(v, "float32"), jax.ShapeDtypeStruct((2, groups, g), "float32"))
    assert wire.dtype == np.uint8 and wire.shape == (2, nbytes // 16, 16)
    assert nbytes == groups * g * bits / 8 + (16 if code == "nvfp4" else 0)  # a line for the chunk's own scale


# --- as published ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["mxfp4", "nvfp4", "fp4_e2m1"])
def test_values_that_are_levels_of_e2m1_are_kept_and_others_go_to_the_nearest_ties_to_even(code):
    levels = np.concatenate([E2M1, -E2M1])
    v = np.tile(levels, 4)[None, None]
    np.testing.assert_array_equal(_round_trip(code, v)[0], v)
    v[0, 0, 16:24] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.01]
    np.testing.assert_array_equal(_round_trip(code, v)[0][0, 0, 16:24], [0, 1, 1, 2, 2, 4, 4, 6])


def test_mxfp4_takes_the_power_of_two_of_the_specification_and_saturates():
    # floor(log2 max) - 2, by hand.
    cases = {6.0: 0, 4.0: 0, 7.99: 0, 8.0: 1, 3.99: -1, 1.0: -2, 100.0: 4, 2.0**-20: -22, 2.0**127: 125}
    v = np.zeros((1, len(cases), 32), np.float32)
    v[0, :, 5] = list(cases)
    rounded, codes, scales, wire = _round_trip("mxfp4", v)
    np.testing.assert_array_equal(scales[0, :, 0], np.float32(2.0) ** np.float32(list(cases.values())))
    scale_bytes = wire.reshape(-1)[len(cases) * 16 :][: len(cases)]  # E8M0: the exponent plus 127
    np.testing.assert_array_equal(scale_bytes, np.array(list(cases.values())) + 127)
    np.testing.assert_array_equal(rounded[0, :3, 5], [6, 4, 6])  # 7.99 saturates
    assert np.abs(codes).max() <= 6


def test_nvfp4_has_an_e4m3_scale_for_16_values_and_a_float32_for_the_chunk():
    v = partials(5, SHAPE)
    v[0, 3, 16:32] *= 1e-9  # beside others in its group, and too small for a scale of the chunk
    _, codes, scales, wire = _round_trip("nvfp4", v)
    blocks = v.reshape(2048, 16)
    magnitude = np.abs(blocks).max(-1)
    of_block, of_chunk = wire.reshape(-1)[16384:18432], wire.reshape(-1)[18432:18436].copy().view(np.float32)
    np.testing.assert_allclose(of_chunk, magnitude.max() / (6 * 448), rtol=2.0**-22)
    wanted = (magnitude / 6 / of_chunk).clip(0, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(of_block, wanted.view(np.uint8))
    wanted = np.float32(wanted) * of_chunk
    np.testing.assert_array_equal(scales.reshape(2048, 16), np.broadcast_to(wanted[:, None], blocks.shape))
    assert wanted[13] == 0 and not codes.reshape(2048, 16)[13].any()
    inverse = np.divide(1, wanted, where=wanted > 0, out=np.zeros_like(wanted))
    nearest = (blocks * inverse[:, None]).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(codes.reshape(2048, 16), np.float32(nearest))


def test_block_fp8_is_e4m3_over_a_448th_of_the_largest():
    v = partials(6, SHAPE, "heavy-tailed")
    rounded, codes, scales, _ = _round_trip("block_fp8", v)
    # XLA multiplies by 1/448.
    np.testing.assert_allclose(scales, np.broadcast_to(np.abs(v).max(-1, keepdims=True) / 448, v.shape), rtol=2.0**-22)
    nearest = np.float32((v * (1 / scales)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn))
    np.testing.assert_array_equal(codes, nearest)
    np.testing.assert_array_equal(rounded, nearest * scales)
    assert np.abs(codes).max() == 448


def test_quickreduce_q4_sends_the_largest_as_minus_8_and_clips_the_other_side_at_7():
    v = np.zeros((1, 2, 32), np.float32)
    v[0, 0, :4], v[0, 1, :4] = [8, -7.9, 1.4, -0.6], [-8, 7.9, 1.4, -0.6]
    _, codes, scales, wire = _round_trip("quickreduce_q4", v)
    np.testing.assert_array_equal(codes[0, :, :4], [[-8, 7, -1, 1], [-8, 7, 1, -1]])
    np.testing.assert_array_equal(scales[0, :, 0], [-1, 1])
    np.testing.assert_array_equal(wire.reshape(-1)[32:36].copy().view(np.float16), [-1, 1])


def test_quickreduce_q4_s_fp16_saturates_large_values_and_loses_small_ones():
    v = np.zeros((1, 5, 32), np.float32)
    v[0, :, 7] = [60_000, 333_824, -1e30, 1e-5, 1e-8]
    rounded, _, _, _ = _round_trip("quickreduce_q4", v)
    # 65504 is fp16's largest number. 1e-5 is multiplied by 65504 instead of 800,000, and so sent as 1, not as 8.
    np.testing.assert_allclose(rounded[0, :, 7], [60_000, 65_504, -65_504, 1e-5 / 8, 0], rtol=0.01)


# --- in a sum --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("code", PEERS)
def test_a_group_with_a_nonfinite_value_decodes_to_nan_and_its_neighbours_do_not_notice(code, bad):
    v = partials(7, SHAPE)
    v[0, 9] *= 0.5  # not the chunk's largest
    clean = _round_trip(code, v)[0]
    dirty = v.copy()
    dirty[0, 9, 40] = bad
    rounded = _round_trip(code, dirty)[0].copy()
    assert np.isnan(rounded[0, 9]).all()
    rounded[0, 9] = clean[0, 9]
    np.testing.assert_array_equal(rounded, clean)


@pytest.mark.parametrize("code", PEERS)
def test_the_residual_is_what_the_bytes_leave_over(code):
    """Compiled together, XLA must not skip the rounding between encoder and decoder."""
    x, residual = partials(8, (1, 40, 64)), partials(9, (1, 40, 64), scale=0.1)
    encoded = jax.jit(lambda x, e: stages.encode(x, e, PEERS[code]))(x, residual)
    received = jax.jit(lambda wire: stages.decode(wire, 40, 64, PEERS[code], jnp.float32))(encoded.wire)
    # Scales of more than 16 bits: code times scale is rounded once more, 2**-24 of it, or not where it is fused.
    left = np.asarray(encoded.values) - np.asarray(received)
    np.testing.assert_allclose(encoded.error, left, rtol=0, atol=2.0**-24 * 1.2)
    assert np.abs(left).max() > 2.0**-8


def test_only_the_quality_command_knows_them(monkeypatch):
    assert not PEERS.keys() & CODECS.keys()
    with pytest.raises(ValueError, match="codec must be one of .* found 'mxfp4'"):
        EchoConfig("mxfp4")
    for code, codec in PEERS.items():
        monkeypatch.setitem(CODECS, code, codec)
    assert quality.communication("mxfp4-32-settled").forward.codec == "mxfp4"


def test_the_quality_command_takes_their_names():
    """Up to what is refused after the names: no model is loaded."""
    found = _run("benchmarks.quality", "--configs", *(f"{code}-64-plain" for code in PEERS), "--tokens", "1")
    assert "tokens must be 2 or more" in found.stderr


# --- the benchmark of speed ------------------------------------------------------------------------------------------


def _run(module, *args):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *args]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process can be bound to a core on Linux only")
def test_codec_speed_prints_a_table_and_ends_with_json():
    found = _run("benchmarks.codec_speed", "--rows", "2", "--rounds", "2", "--codes", "int4", "mxfp4", "none")
    assert found.returncode == 0, found.stderr
    *table, last = found.stdout.splitlines()
    result = json.loads(last)
    assert (result["rows"], result["columns"], result["group_size"]) == (2, 4096, 128)
    assert {row["code"]: row["bits"] for row in result["codes"]} == {"int4": 4.125, "mxfp4": 4.25, "none": 32}
    assert all(value > 0 for row in result["codes"] for key, value in row.items() if key != "code")
    assert result["copy_values_per_s"] > 0
    assert [line.split()[0] for line in table[2:]] == ["copy", "int4", "mxfp4", "none"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": ("int7",)}, "codes must be some of .*mxfp4.*found"),
        ({"codes": ()}, "codes must be some of"),
        ({"rows": 0}, "rows and rounds must be at least 1, found 0"),
        ({"group_size": 48}, "group_size must be a power of two from 32 to 1024, found 48"),
    ],
)
def test_codec_speed_refuses_what_it_cannot_measure(changes, message):
    with pytest.raises(ValueError, match=message):
        codec_speed.main(codec_speed.Args(**changes))
