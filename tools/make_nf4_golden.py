"""Writes tests/golden/nf4_encoding.json: what bitsandbytes makes of tensors in NF4 with double quantisation.

Needs torch and bitsandbytes (0.46 or later, for its CPU code): python3 tools/make_nf4_golden.py
"""

import json
import pathlib
import struct

import bitsandbytes
import torch
from bitsandbytes.functional import create_dynamic_map, quantize_4bit

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden" / "nf4_encoding.json"


def hex_floats(tensor):
    """fp32 values, little-endian, in hexadecimal."""
    values = tensor.float().flatten().tolist()
    return struct.pack(f"<{len(values)}f", *values).hex()


def case(name, tensor):
    tensor = tensor.float()
    _, plain = quantize_4bit(tensor, blocksize=64, quant_type="nf4")
    packed, state = quantize_4bit(tensor, blocksize=64, quant_type="nf4", compress_statistics=True)
    return {
        "name": name,
        "shape": list(tensor.shape),
        "values": hex_floats(tensor),
        "packed": bytes(packed.flatten().tolist()).hex(),
        "plain_absmax": hex_floats(plain.absmax),
        "absmax": bytes(state.absmax.flatten().tolist()).hex(),
        "nested_absmax": hex_floats(state.state2.absmax),
        "offset": hex_floats(state.offset),
    }


def main():
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    spread = normal(4, 128) * torch.exp(normal(4, 1))
    spread[1] = 0
    cases = [
        case("one_block", normal(1, 64)),
        case("a_row_of_zeros_and_unequal_rows", spread),
        case("more_than_one_nested_block", (0.02 * normal(80, 256)).bfloat16()),
        case("half_way_between_codes", torch.linspace(-1, 1, 256).reshape(2, 128)),
    ]
    golden = {
        "made_with": f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}",
        "nested_map": hex_floats(create_dynamic_map(True, 7, 8)),
        "cases": cases,
    }
    OUT.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
