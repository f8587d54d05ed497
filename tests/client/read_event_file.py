#!/usr/bin/env python3
"""Reads a TensorBoard event file without TensorBoard, checks every checksum, and prints one JSON object an event."""
import json
import struct
import sys


def masked_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift, more = at + 1, shift + 7, data[at] & 128
        if not more:
            return value, at


def fields(data):
    """(number, value) of each field of a message; numbers as Python's, the rest as bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        elif key & 7 == 5:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        else:
            size, at = varint(data, at)
            value, at = data[at:at + size], at + size
        yield key >> 3, value


def records(data):
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        payload = data[at + 12:at + 12 + size]
        for name, checked, place in (("length", data[at:at + 8], at + 8), ("data", payload, at + 12 + size)):
            (stored,) = struct.unpack_from("<I", data, place)
            if stored != masked_crc32c(checked):
                sys.exit(f"record at byte {at}: the checksum of its {name} is {stored:#x}, not {masked_crc32c(checked):#x}")
        yield payload
        at += 16 + size


def main():
    with open(sys.argv[1], "rb") as file:
        data = file.read()
    for payload in records(data):
        event = {"step": 0, "values": {}}
        for number, value in fields(payload):
            if number == 1:
                event["wall_time"] = value
            elif number == 2:
                event["step"] = value
            elif number == 3:
                event["version"] = value.decode()
            elif number == 5:
                for _, entry in fields(value):
                    named = dict(fields(entry))
                    event["values"][named[1].decode()] = named[2]
        print(json.dumps(event))


main()
