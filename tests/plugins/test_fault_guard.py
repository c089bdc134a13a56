"""SIGBUS outside the guarded weights ends a process, however many engines have guards in it."""

import signal
import subprocess
import sys
from pathlib import Path

from trtc.builder.targets.cxx import find_compiler

CPU = Path(__file__).parents[2] / "plugins" / "cpu"
SOURCE = """
#include "fault_guard.hpp"
extern "C" void guard(const void* memory, std::size_t bytes) {
  new trtc::engine::FaultGuard(memory, bytes, "guarded", 7);
}
"""
PROGRAM = """
import ctypes, mmap, sys
weights = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(weights))
first, second = (ctypes.CDLL(path) for path in sys.argv[1:3])
for library in (first, second, first):
    library.guard(ctypes.c_void_p(address), ctypes.c_size_t(4096))
with open(sys.argv[3], "r+b") as file:
    other = mmap.mmap(file.fileno(), 4096)
    file.truncate(0)
    other[0]
"""


def test_guards_of_several_engines_opened_in_turns_leave_the_default_action(tmp_path: Path) -> None:
    source, libraries = tmp_path / "guard.cpp", [tmp_path / "a.so", tmp_path / "b.so"]
    source.write_text(SOURCE)
    for library in libraries:
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-I", str(CPU)]
        command = [*find_compiler().command, *flags, str(source), "-o", str(library)]
        subprocess.run(command, check=True)
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, libraries), str(file)], check=False, timeout=60
    )
    assert ended.returncode == -signal.SIGBUS
