"""runtime/executors/cuda/nccl.py against a library of nccl.h's prototypes, which has no GPU."""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trtc.builder.targets.cxx import find_compiler
from trtc.protos.errors import EnvironmentFault
from trtc.runtime.executors.cuda import nccl
from trtc.runtime.executors.cuda.device import Seat

# Types and numbers as in NCCL 2.32's nccl.h; every "rank" has what rank 0 has.
LIBRARY = r"""
#include <cstring>
#include <cstddef>
extern "C" {
typedef int ncclResult_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct ncclComm { int ranks, rank; char id[128]; }* ncclComm_t;
typedef void* cudaStream_t;
static ncclComm member;
int aborted = 0;
void* last_stream = nullptr;
static size_t size_of(int type) {
  switch (type) { case 0: return 1; case 6: case 9: return 2; case 7: return 4; }
  return 0;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  for (int i = 0; i < 128; ++i) id->internal[i] = static_cast<char>(i * 7);
  return 0;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  for (int i = 0; i < 128; ++i) if (id.internal[i] != static_cast<char>(i * 7)) return 4;
  if (rank >= ranks) return 4;
  member.ranks = ranks; member.rank = rank; *comm = &member; aborted = 0;
  return 0;
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, int type, int op,
                           ncclComm_t comm, cudaStream_t stream) {
  if (comm != &member || op != 0 || type != 7) return 4;
  last_stream = stream;
  for (size_t i = 0; i < count; ++i)
    static_cast<float*>(to)[i] = comm->ranks * static_cast<const float*>(from)[i];
  return 0;
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, int type,
                           ncclComm_t comm, cudaStream_t stream) {
  if (comm != &member) return 4;
  last_stream = stream;
  size_t bytes = count * size_of(type);
  char* target = static_cast<char*>(to);
  for (int i = 0; i < comm->ranks; ++i) std::memcpy(target + i * bytes, from, bytes);
  return 0;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { aborted += comm == &member; return 0; }
const char* ncclGetErrorString(ncclResult_t result) {
  return result == 4 ? "invalid argument" : "no error";
}
}
"""
STREAM = 0x7FFF12345678
"""More than 32 bits, as addresses have."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nccl")
    source, target = directory / "nccl.cpp", directory / "libnccl.so.2"
    source.write_text(LIBRARY)
    command = [*find_compiler().command, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"]
    subprocess.run([*command, str(source), "-o", str(target)], check=True)
    return target


@pytest.fixture
def library(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.setattr(nccl, "load_vendor_library", lambda name: ctypes.CDLL(str(compiled)))
    return ctypes.CDLL(str(compiled))


def test_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(EnvironmentFault, match=r"trtc\[cuda\]") as caught:
        nccl.make_rendezvous()
    assert caught.value.field == "libnccl"


def test_calls_arrive_as_they_were_made(library: ctypes.CDLL) -> None:
    rendezvous = nccl.make_rendezvous()
    assert rendezvous == bytes(i * 7 % 256 for i in range(128))
    communicator = nccl.NcclCommunicator(Seat(2, 3, rendezvous))
    given = np.arange(5, dtype=np.float32)
    total = np.zeros(5, np.float32)
    communicator.all_reduce(given.ctypes.data, total.ctypes.data, 5, "f32", STREAM)
    np.testing.assert_array_equal(total, 3 * given)
    whole = np.zeros((3, 5), np.float32)
    communicator.all_gather(given.ctypes.data, whole.ctypes.data, given.nbytes, STREAM)
    np.testing.assert_array_equal(whole, [given] * 3)
    assert ctypes.c_void_p.in_dll(library, "last_stream").value == STREAM


def test_a_refusal_is_told_in_the_library_s_words(library: ctypes.CDLL) -> None:
    with pytest.raises(EnvironmentFault, match="NCCL: invalid argument"):
        nccl.NcclCommunicator(Seat(3, 3, nccl.make_rendezvous()))
    communicator = nccl.NcclCommunicator(Seat(0, 2, nccl.make_rendezvous()))
    with pytest.raises(EnvironmentFault, match="invalid argument"):
        communicator.all_reduce(0, 0, 1, "bf16", STREAM)


def test_a_membership_ends_once(library: ctypes.CDLL) -> None:
    communicator = nccl.NcclCommunicator(Seat(0, 2, nccl.make_rendezvous()))
    communicator.abort()
    communicator.abort()
    assert ctypes.c_int.in_dll(library, "aborted").value == 1
    with pytest.raises(EnvironmentFault, match="has left its group"):
        communicator.all_gather(0, 0, 0, STREAM)
