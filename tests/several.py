"""Several processes of Python on this machine that find each other over loopback."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def started(arguments, *, count, devices, folder):
    """`count` processes of `devices` virtual devices each, of Python with `arguments`."""
    address = f"localhost:{free_port()}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(ROOT),
        # Process 0 alone writes compiled programs; it would wait for the others' compilers.
        "JAX_ENABLE_COMPILATION_CACHE": "true" if count == 1 else "false",
    }
    return [
        subprocess.Popen(
            [sys.executable, *arguments(index, address)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


def finished(running, seconds=1200):
    """(exit status, standard output, standard error) of each."""
    found = []
    try:
        for process in running:
            out, err = process.communicate(timeout=seconds)
            found.append((process.returncode, out, err))
    finally:
        for process in running:
            process.kill()
    return found


def wait_until(happened, *running):
    """Waits for what processes that go on make happen."""
    until = time.monotonic() + 900
    while not happened():
        assert time.monotonic() < until, "nothing happened"
        assert all(process.poll() is None for process in running), finished(running)
        time.sleep(0.002)


def lines_in(path):
    """How many lines a file has, which may not be there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0
