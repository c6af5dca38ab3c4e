"""Promise 4: at most two quantisations a value and call, for any number of ranks; none of what never travels."""

import numpy as np
import pytest
from helpers import assert_same_bits, compiled_psum, on_ranks, partials, zero_state

import echo_jax
from echo_jax import EchoConfig
from echo_jax.codecs import CODECS, Codec


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("algorithm", "quantisations"), [("two_shot", 2), ("one_shot", 1), ("exact", 0)])
def test_a_call_quantises_at_most_twice_for_any_number_of_ranks(algorithm, quantisations, ranks, monkeypatch):
    """Counted while the program of one rank is traced: sent values once, the sum of a chunk once."""
    encoded = []
    encode = Codec.encode

    def counting(self, v, dtype):
        encoded.append(v.shape)
        return encode(self, v, dtype)

    monkeypatch.setattr(Codec, "encode", counting)
    config = EchoConfig(algorithm=algorithm)
    call = on_ranks(lambda x: echo_jax.echo_psum(x, "tp", echo_jax.init_state(x, "tp", config), config)[0], ranks)
    call.lower(np.zeros((ranks, 4, 1024), np.float32))
    assert len(encoded) == quantisations
    if algorithm == "two_shot":
        sent, reduced = (np.prod(shape) for shape in encoded)
        assert sent == 4 * 1024 if 1024 % ranks == 0 else sent >= 4 * 1024
        assert reduced == sent / ranks


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("codec", ["int4", "int8"])
def test_the_error_of_a_call_is_one_rounding_of_each_sent_value_and_one_of_the_sum(codec, ranks):
    """|y - sum x| <= c (sum of M_r over the ranks that sent the chunk) + c (largest |a|), a the sum itself."""
    config = EchoConfig(codec, 32, algorithm="two_shot")
    c = CODECS[codec].error_bound("float32")
    x = partials(ranks, (ranks, 3, 32 * ranks))
    y, _ = compiled_psum(config, ranks)(x, zero_state(x, config))
    chunks = np.float64(x).reshape(ranks, 3, ranks, 32)  # rank j owns columns [32 j, 32 (j + 1))
    largest = np.abs(chunks).max(-1)
    sent = largest.sum(0) - np.einsum("jrj->rj", largest)  # every rank but the owner
    allowed = c * sent + c * (np.abs(chunks.sum(0)).max(-1) + c * sent)
    error = np.abs(np.float64(y[0]).reshape(3, ranks, 32) - chunks.sum(0)).max(-1)
    assert (error <= allowed * (1 + 1e-5)).all()  # 1e-5: some 16 float32 roundings of 2**-24, with room
    assert (error > 0).all()


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_own_chunk_enters_the_sum_as_it_is(ranks):
    """Rank 0 holds v in the chunk that it owns, rank 1 minus what v would be after a rounding: what comes out is the
    rounding error of v, which would be exactly 0 had the owner rounded v too."""
    config = EchoConfig("int4", 64, algorithm="two_shot")
    v = partials(3, (64,))
    alone = np.zeros((2, 128), np.float32)
    alone[1, :64] = v  # rank 1 sends it to rank 0, which owns the chunk
    rounded, _ = compiled_psum(config, 2)(alone, zero_state(alone, config))
    rounded = np.asarray(rounded)[0, :64]

    x = np.zeros((ranks, 64 * ranks), np.float32)
    x[0, :64], x[1, :64] = v, -rounded
    y, _ = compiled_psum(config, ranks)(x, zero_state(x, config))
    error = v - rounded
    assert np.abs(error).max() > 0.01
    # One rounding of the sum, to the grid of its own largest value: 1/14 of it, and 2**-8 for the scale.
    np.testing.assert_allclose(np.asarray(y)[0, :64], error, rtol=0, atol=np.abs(error).max() / 14 * (1 + 2.0**-7))


def test_a_value_that_only_its_owner_holds_is_rounded_once_and_the_error_is_kept_once():
    config = EchoConfig("int8", 64, algorithm="two_shot", residual="float32")
    x = np.zeros((4, 256), np.float32)
    for rank in range(4):
        x[rank, 64 * rank : 64 * (rank + 1)] = partials(rank, (64,))
    y, state = compiled_psum(config, 4)(x, zero_state(x, config))
    kept = np.asarray(state.residual)[:, 0, :, 0]  # [rank, chunk, 64]
    for rank in range(4):
        own = slice(64 * rank, 64 * (rank + 1))
        np.testing.assert_array_equal(kept[rank, rank], x[rank, own] - np.asarray(y)[rank, own])
        assert not np.delete(kept[rank], rank, axis=0).any()


def test_one_shot_rounds_once():
    """With the other ranks at zero, what one_shot gives is what two_shot's first rounding gives."""
    one_shot, two_shot = EchoConfig("int8", 64, algorithm="one_shot"), EchoConfig("int8", 64, algorithm="two_shot")
    x = np.zeros((3, 192), np.float32)
    x[1, 64 * 2 :] = partials(5, (64,))
    once, _ = compiled_psum(one_shot, 3)(x, zero_state(x, one_shot))
    # int8 codes of a rounded group are its own codes again (its largest is 127 steps), so the second rounding is idle.
    twice, _ = compiled_psum(two_shot, 3)(x, zero_state(x, two_shot))
    assert_same_bits(once, twice)
