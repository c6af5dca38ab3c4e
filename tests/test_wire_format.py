"""The bytes that docs/wire-format.md specifies: golden vectors, read by a decoder that was written from that page."""

import json
import math
import struct
from pathlib import Path

import jax
import numpy as np
import pytest

from echo_jax.checkpoint import WIRE_VERSION
from echo_jax.codecs import CODECS

GOLDEN = Path(__file__).parent / f"golden/wire-{WIRE_VERSION}.json"
GROUPS, GROUP = 3, 32
# name: (lowest level, levels, codes a word, bits of a word)
TABLE = {
    "hadamard_int3": (-4, 8, 1, 3),
    "hadamard_int4": (-8, 16, 1, 4),
    "hadamard_int4.5": (-11, 22, 2, 9),
    "hadamard_int5": (-16, 32, 1, 5),
    "hadamard_int6": (-32, 64, 1, 6),
    "int4": (-7, 15, 1, 4),
    "int8": (-127, 255, 1, 8),
}


def read(wire: bytes, groups: int, group: int, low: int, levels: int, codes_per_word: int, word_bits: int):
    """(whole levels [groups][group], scales [groups]): the page in plain Python."""
    words_a_group = group // codes_per_word
    words = [[0] * words_a_group for _ in range(groups)]
    position = shift = 0
    while shift < word_bits:
        width = next(width for width in (8, 4, 2, 1) if width <= word_bits - shift)
        nbytes = words_a_group * width // 8
        for g in range(groups):
            for b in range(nbytes):
                byte = wire[position + g * nbytes + b]
                for part in range(8 // width):
                    words[g][b + part * nbytes] |= (byte >> (part * width) & (1 << width) - 1) << shift
        position += math.ceil(groups * nbytes / 16) * 16
        shift += width
    scales = [struct.unpack("<f", b"\0\0" + wire[position + 2 * g : position + 2 * g + 2])[0] for g in range(groups)]
    assert len(wire) == position + math.ceil(2 * groups / 16) * 16
    digits = [
        [low + word // levels ** (codes_per_word - 1 - d) % levels for d in range(codes_per_word) for word in row]
        for row in words
    ]
    return digits, scales


def inputs() -> np.ndarray:
    """float32[3, 32]: noise, a spike among small values, values on the borders of codes with their largest negative."""
    rng = np.random.default_rng(7)
    noise, spike = rng.normal(size=GROUP), 1e-3 * rng.normal(size=GROUP)
    spike[5] = 1e4
    borders = (np.arange(GROUP) - 16.0) / 2
    return np.stack([noise, spike, borders]).astype(np.float32)


def entry(name: str) -> dict[str, str]:
    """A code's vector: what it is given, in its own domain, what it sends, and what is read, in x's domain."""
    codec, v = CODECS[name], inputs()

    def read_back(wire):
        codes, scales = codec.decode(wire, GROUPS, GROUP, "bfloat16")
        return codec.rotate_back(codes) * scales

    wire = np.asarray(jax.jit(lambda v: codec.encode(v, "bfloat16"))(v))
    values = np.asarray(jax.jit(read_back)(wire))
    return {"input": v.astype("<f4").tobytes().hex(), "wire": wire.tobytes().hex(), "values": values.tobytes().hex()}


def write() -> None:
    GOLDEN.parent.mkdir(exist_ok=True)
    vectors = {"groups": GROUPS, "group_size": GROUP, "codes": {name: entry(name) for name in CODECS}}
    GOLDEN.write_text(json.dumps(vectors, indent=1) + "\n")


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())["codes"]


def test_every_code_has_a_vector_and_a_row_of_the_table(golden):
    assert set(golden) == set(CODECS) == {*TABLE, "none"}
    page = (Path(__file__).parents[1] / "docs/wire-format.md").read_text(encoding="utf-8")
    for name, (low, levels, codes_per_word, word_bits) in TABLE.items():
        cells = [cell.strip() for cell in next(row for row in page.splitlines() if f"| `{name}`" in row).split("|")]
        assert cells[2] == str(levels) and cells[3] == f"{low} … {low + levels - 1}"
        assert cells[4] == str(codes_per_word) and cells[5] == str(word_bits)
        assert float(cells[7]) == CODECS[name].bits(128, "float32")


@pytest.mark.quick
@pytest.mark.parametrize("name", CODECS)
def test_the_encoder_sends_the_golden_bytes_and_reads_them_to_the_same_values(name, golden):
    """A change of these needs a new WIRE_VERSION: `python -m tests.test_wire_format` writes its vectors."""
    assert entry(name) == golden[name]


@pytest.mark.quick
@pytest.mark.parametrize("name", TABLE)
def test_a_decoder_written_from_the_page_reads_the_same_values(name, golden):
    low, levels, codes_per_word, word_bits = TABLE[name]
    wire = bytes.fromhex(golden[name]["wire"])
    codes, scales = read(wire, GROUPS, GROUP, low, levels, codes_per_word, word_bits)
    if name.startswith("hadamard"):
        matrix = [[(-1) ** (i & k).bit_count() for k in range(GROUP)] for i in range(GROUP)]
        codes = [[sum(c * matrix[i][k] for i, c in enumerate(row)) for k in range(GROUP)] for row in codes]
    values = np.float32(codes) * np.float32(scales)[:, None]
    assert values.tobytes().hex() == golden[name]["values"]


@pytest.mark.parametrize("name", TABLE)
def test_an_encoder_written_from_the_page_sends_the_same_codes_but_for_ties(name, golden):
    low, levels, codes_per_word, word_bits = TABLE[name]
    high, clip = low + levels - 1, 0.0 if name in ("int4", "int8") else 0.5
    codes, scales = read(bytes.fromhex(golden[name]["wire"]), GROUPS, GROUP, low, levels, codes_per_word, word_bits)
    for v, row, scale in zip(inputs(), codes, scales, strict=True):
        largest, other = max(v.max(), -v.min()), min(v.max(), -v.min())
        step = np.float32(max(largest / np.float32(clip - low), other / np.float32(clip + high)))
        if low != -high and v.max() > -v.min():
            step = -step
        bits = int(np.float32(step).view(np.uint32))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to nearest, ties to even
        assert np.uint32(bits << 16).view(np.float32) == scale
        place = np.clip(np.float64(v) / np.float64(scale), low - 0.5, high + 0.5)
        assert (np.abs(place - row) <= 0.5 + 1e-5).all()


if __name__ == "__main__":
    write()
