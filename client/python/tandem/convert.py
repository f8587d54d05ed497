#!/usr/bin/env python3
"""Parquet to JSON lines, which jobs read.

  python3 -m tandem.convert train.parquet > train.jsonl
  python3 -m tandem.convert DIRECTORY --split=test > test.jsonl    # a data set as the Hugging Face hub lays it out

Rows are read and written some at a time, whatever the file's size. Needs pyarrow: pip install pyarrow.
"""
import argparse
import base64
import datetime
import decimal
import json
import math
import os
import sys

BATCH_ROWS = 1024


def fail(message):
    sys.exit(f"tandem.convert: {message}")


def find_files(path, split):
    """The Parquet files of `split` under a directory, in order of name: train-00000-of-00002.parquet, train.parquet, train/0.parquet."""
    if not os.path.isdir(path):
        return [path]
    found = []
    for folder, _, names in os.walk(path):
        for name in names:
            parts = os.path.relpath(os.path.join(folder, name), path).replace(os.sep, "/").split("/")
            stem = name[: -len(".parquet")]
            is_of_split = split in parts[:-1] or stem == split or stem.startswith(split + "-")
            if name.endswith(".parquet") and is_of_split:
                found.append(os.path.join(folder, name))
    if not found:
        fail(f"{path} holds no Parquet file of the split '{split}'")
    return sorted(found)


def to_json(value, column):
    """What JSON has a word for; bytes as base64, times in ISO 8601, numbers that are not finite as null."""
    if isinstance(value, dict):
        return {key: to_json(inner, column) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(inner, column) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return fail(f"column '{column}' holds a {type(value).__name__}, for which JSON has no word")


def convert(paths, columns, out):
    """Writes every row of the files; how many."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        fail("reading Parquet needs pyarrow: pip install pyarrow")
    num_rows = 0
    for path in paths:
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowInvalid) as error:
            fail(f"cannot read {path}: {error}")
        missing = [name for name in columns or [] if name not in file.schema_arrow.names]
        if missing:
            fail(f"{path} has no column '{missing[0]}'; it has: {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            for row in batch.to_pylist():
                out.write(json.dumps({name: to_json(value, name) for name, value in row.items()}, ensure_ascii=False) + "\n")
                num_rows += 1
    return num_rows


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="+", help="Parquet files, or directories of them")
    parser.add_argument("--split", default="train", help="of a directory (default: train)")
    parser.add_argument("--columns", help="names, separated by commas (default: all)")
    args = parser.parse_args(arguments)
    paths = [file for path in args.path for file in find_files(path, args.split)]
    columns = args.columns.split(",") if args.columns else None
    num_rows = convert(paths, columns, sys.stdout)
    print(f"{num_rows} rows of {len(paths)} files", file=sys.stderr)


if __name__ == "__main__":
    main()
