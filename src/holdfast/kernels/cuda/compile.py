"""CUDA sources of this package: compiled when first used, for the card at hand, and launched.

NVIDIA's compiler library and the bindings to it and to the driver come with PyTorch's CUDA builds. What is compiled
takes a second or two and is kept for the process. A caller has to expect :class:`UnavailableError`: no bindings, or a
compiler or driver that cannot do it.
"""

# NVIDIA's bindings have no types.
# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class UnavailableError(Exception):
    """No kernel can be made here."""


def makes(device: torch.device, kernels: Callable[[int], object]) -> bool:
    """Whether this is a card that the sources are written for, and its kernels can be made."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        kernels(device.index or 0)
    except UnavailableError:
        return False
    return True


def source(name: str) -> str:
    """The text of a file beside this one, behind what all of them share."""
    return "".join(Path(__file__).with_name(item).read_text("utf-8") for item in ("hopper.cu", name))


class Kernel:
    """One kernel of one source on one device."""

    def __init__(self, text: str, name: str, options: Sequence[str], device: int, threads: int, shared: int) -> None:
        try:
            from cuda.bindings import driver

            code = _compiled(text, tuple(options))
        except (ImportError, OSError, RuntimeError) as error:  # no bindings, or no library behind them
            raise UnavailableError(str(error)) from None
        self._driver, self._threads, self._shared = driver, threads, shared
        with torch.cuda.device(device):
            torch.zeros(1, device="cuda")  # PyTorch's context is there and current
            module = _checked(driver.cuModuleLoadData(code))
            self._function = _checked(driver.cuModuleGetFunction(module, name.encode()))
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self._function, most, shared))

    def clusters(self, size: int) -> int:
        """How many clusters of so many processors run at a time."""
        launch = self._driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = size, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = self._threads, 1, 1
        launch.sharedMemBytes = self._shared
        return int(_checked(self._driver.cuOccupancyMaxActiveClusters(self._function, launch)))

    def launch(self, programs: int, arguments: Sequence[Any], device: torch.device) -> None:
        """On the current stream; arguments are ctypes' values, tensors and tensor maps."""
        given = [
            ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, Tensor) else argument for argument in arguments
        ]
        places = (ctypes.c_void_p * len(given))(*(ctypes.addressof(item) for item in given))
        stream = torch.cuda.current_stream(device).cuda_stream
        grid = (programs, 1, 1, self._threads, 1, 1, self._shared)
        _checked(self._driver.cuLaunchKernel(self._function, *grid, stream, ctypes.addressof(places), 0))


def tensor_map(values: Tensor, shape: Sequence[int], box: Sequence[int]) -> Any:
    """How the copy engine finds pieces (``box``) of contiguous bf16 values that are seen as ``shape``, outermost first.

    A piece's rows are 64 values, 128 bytes, in the order that the matrix units read; outside it finds 0.
    """
    if not values.is_contiguous() or values.dtype != torch.bfloat16:
        raise ValueError(f"expected contiguous bf16 values, found {values.dtype} with strides {values.stride()}")
    return _map(values.data_ptr(), tuple(shape), tuple(box))


@lru_cache(maxsize=1024)
def _map(pointer: int, shape: tuple[int, ...], box: tuple[int, ...]) -> Any:
    from cuda.bindings import driver

    number, wide = driver.cuuint32_t, driver.cuuint64_t
    steps: list[Any] = []
    step = 2
    for size in shape[:0:-1]:
        step *= size
        steps.append(wide(step))
    made = _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(shape),
            pointer,
            [wide(size) for size in shape[::-1]],
            steps,
            [number(size) for size in box[::-1]],
            [number(1)] * len(shape),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return (ctypes.c_char * 128).from_buffer_copy(ctypes.string_at(made.getPtr(), 128))


@lru_cache(maxsize=8)
def _compiled(text: str, options: tuple[str, ...]) -> bytes:
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), b"holdfast.cu", 0, [], []))
    flags = [b"--gpu-architecture=sm_90a", *(option.encode() for option in options)]
    (outcome,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(outcome) != 0:
        message = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, message)
        raise UnavailableError(f"does not compile: {message.decode(errors='replace')}")
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def _checked(answer: tuple[Any, ...]) -> Any:
    outcome, *rest = answer
    if int(outcome) != 0:
        raise UnavailableError(f"the CUDA driver says {outcome.name}")
    return rest[0] if rest else None
