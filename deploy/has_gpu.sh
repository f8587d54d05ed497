#!/bin/sh
# Succeeds where an NVIDIA GPU that Tandem runs on (Ampere or later), with its driver, is there and CUDA_VISIBLE_DEVICES does not hide it.
[ "${CUDA_VISIBLE_DEVICES-0}" != "" ] && [ "${CUDA_VISIBLE_DEVICES-0}" != -1 ] || exit 1
nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | grep -qE '^([89]|[1-9][0-9])\.'
