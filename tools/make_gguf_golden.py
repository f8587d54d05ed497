"""Writes tests/golden/gguf_blocks.json: blocks of GGUF's quantised types and the fp32 values that they stand for.

Decodes bit by bit from the layouts of ggml-common.h, with every product and sum rounded to fp32 in the order in which ggml
rounds. Needs nothing but Python: python3 tools/make_gguf_golden.py
"""

import json
import pathlib
import random
import struct

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden" / "gguf_blocks.json"


def single(value):
    """To fp32; of a product or a sum of two fp32 numbers the one rounding that fp32 arithmetic does."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def half(block, offset):
    return struct.unpack_from("<e", block, offset)[0]


def bits(block, first, count):
    """`count` bits from bit `first` on, counted from the lowest bit of byte 0."""
    return (int.from_bytes(block, "little") >> first) & ((1 << count) - 1)


def nibble_bit(byte, high):
    return 8 * byte + 4 * high


def q5_codes(block, offset):
    """32 codes: fifth bits in 4 bytes, then nibbles of which byte i holds values i and i + 16."""
    return [
        bits(block, nibble_bit(offset + 4 + i % 16, i // 16), 4) + 16 * bits(block, 8 * offset + i, 1) for i in range(32)
    ]


def decode_q5_0(block):
    return [single(half(block, 0) * (code - 16)) for code in q5_codes(block, 2)]


def decode_q5_1(block):
    return [single(single(half(block, 0) * code) + half(block, 2)) for code in q5_codes(block, 4)]


def sub_block_scale(block, s):
    """6-bit scale and minimum of sub-block `s`, out of the 12 bytes at 4."""
    if s < 4:
        return bits(block, 8 * (4 + s), 6), bits(block, 8 * (8 + s), 6)
    low = 8 * (12 + s - 4)
    return (bits(block, low, 4) + 16 * bits(block, 8 * s + 6, 2),
            bits(block, low + 4, 4) + 16 * bits(block, 8 * (s + 4) + 6, 2))


def decode_with_sub_blocks(block, code):
    values = []
    for i in range(256):
        scale, minimum = sub_block_scale(block, i // 32)
        product = single(single(half(block, 0) * scale) * code(i))
        values.append(single(product - single(half(block, 2) * minimum)))
    return values


def decode_q4_k(block):
    return decode_with_sub_blocks(block, lambda i: bits(block, nibble_bit(16 + i // 64 * 32 + i % 32, i // 32 % 2), 4))


def decode_q5_k(block):
    return decode_with_sub_blocks(
        block, lambda i: bits(block, nibble_bit(48 + i // 64 * 32 + i % 32, i // 32 % 2), 4) + 16 * bits(
            block, 8 * (16 + i % 32) + i // 32, 1))


def decode_q6_k(block):
    values = []
    for i in range(256):
        part, quarter, place = i // 128, i % 128 // 32, i % 32
        low = bits(block, nibble_bit(64 * part + 32 * (quarter % 2) + place, quarter // 2), 4)
        high = bits(block, 8 * (128 + 32 * part + place) + 2 * quarter, 2)
        scale = struct.unpack_from("<b", block, 192 + i // 16)[0]
        values.append(single(single(half(block, 208) * scale) * (low + 16 * high - 32)))
    return values


# By type: bytes of a block, where its fp16 numbers are, decoder.
TYPES = {
    "Q5_0": (22, [0], decode_q5_0),
    "Q5_1": (24, [0, 2], decode_q5_1),
    "Q4_K": (144, [0, 2], decode_q4_k),
    "Q5_K": (176, [0, 2], decode_q5_k),
    "Q6_K": (210, [208], decode_q6_k),
}


def case(name, fill, numbers):
    size, places, decode = TYPES[name]
    block = bytearray(fill(size))
    for place, number in zip(places, numbers):
        struct.pack_into("<e", block, place, number)
    values = decode(bytes(block))
    return {"type": name, "block": block.hex(), "values": struct.pack(f"<{len(values)}f", *values).hex()}


def main():
    rng = random.Random(1)
    cases = []
    for name in TYPES:
        cases.append(case(name, rng.randbytes, [0.00731, -0.0213]))
        cases.append(case(name, rng.randbytes, [-3.1e-6, 0.0417]))  # the first is a subnormal number of fp16
        cases.append(case(name, lambda size: b"\xff" * size, [65504.0, 65504.0]))
    OUT.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
