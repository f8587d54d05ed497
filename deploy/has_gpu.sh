#!/bin/sh
# Succeeds where an NVIDIA GPU with its driver is there and CUDA_VISIBLE_DEVICES does not hide it.
[ "${CUDA_VISIBLE_DEVICES-0}" != "" ] && [ "${CUDA_VISIBLE_DEVICES-0}" != -1 ] || exit 1
if command -v nvidia-smi > /dev/null; then nvidia-smi -L 2> /dev/null | grep -q '^GPU'; else ls /dev/nvidia[0-9]* > /dev/null 2>&1; fi
