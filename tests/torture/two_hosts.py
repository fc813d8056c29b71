"""two_hosts.py FOLDER COMMAND...: runs the command on two hosts, network namespaces joined by a cable, with --node-rank 0 and 1 at its end.

They are 10.77.0.1 and 10.77.0.2. What each writes goes to FOLDER/host0 and FOLDER/host1, the exit codes to FOLDER/codes. To be run in a user and network
namespace of its own (unshare -rn).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def set_up(interface: str, host: int) -> None:
    ip("link", "set", "lo", "up")
    ip("addr", "add", f"10.77.0.{host + 1}/24", "dev", interface)
    ip("link", "set", interface, "up")


def start(folder: Path, command: list[str], host: int) -> subprocess.Popen[bytes]:
    with open(folder / f"host{host}", "wb") as file:
        return subprocess.Popen([*command, "--node-rank", str(host)], stdout=file, stderr=file)


def second_host(folder: Path, command: list[str], ready: int, cable: int) -> int:
    if LIBC.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    os.write(ready, b"x")
    os.read(cable, 1)   # until the first host has given this one its end
    set_up("cable1", 1)
    os.write(ready, b"x")
    return start(folder, command, 1).wait()


def main() -> int:
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    ready, from_second = os.pipe()
    for_second, cable = os.pipe()
    second = os.fork()
    if second == 0:
        os._exit(second_host(folder, command, from_second, for_second))
    os.close(from_second)   # so that a second host that fails is noticed
    os.read(ready, 1)
    ip("link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", str(second))
    set_up("cable0", 0)
    os.write(cable, b"x")
    if not os.read(ready, 1):
        raise OSError("the second host cannot be set up")
    first = start(folder, command, 0).wait()
    code = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
    (folder / "codes").write_text(f"{first} {code}")
    return first


if __name__ == "__main__":
    sys.exit(main())
