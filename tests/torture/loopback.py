"""loopback.py SWITCH COMMAND...: runs the command with the loopback of this network namespace up, and takes it down once the file SWITCH is there."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import time

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def set_up(up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))
        flags = flags | IFF_UP if up else flags & ~IFF_UP
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


def main() -> int:
    switch, command = sys.argv[1], sys.argv[2:]
    set_up(True)
    process = subprocess.Popen(command)
    while process.poll() is None:
        if os.path.exists(switch):
            set_up(False)
            return process.wait()
        time.sleep(0.01)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
