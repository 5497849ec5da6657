"""Proof, without a GPU, that the CUDA build of requirements/lock-gpu.txt loads and takes our command lines.

`make check-cuda` (check.py) writes record.json; test_cuda_build.py fails where the record is older than the lock or a
flag. Start reading in check.py.
"""
