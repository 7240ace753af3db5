"""What planning needs to know of a GPU, read from the driver or given by name.

A plan depends on the card through this value alone, so that the plan of any card can be computed, tested and
simulated on a machine that has none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

__all__ = ["NAMED_DEVICES", "Device", "cuda_device", "named_device"]

#: Oldest architecture with cp.async and the m16n8k16 bf16 mma.
MIN_ARCH = 80


@dataclass(frozen=True)
class Device:
    """A GPU, as far as plans depend on it.

    Attributes
    ----------
    name : str
    arch : int
        Compute capability times ten: 80, 86, 89, 90, 100, 120.
    num_sms : int
        Multiprocessors.
    shared_per_block : int
        Bytes of shared memory that one block may ask for.
    shared_per_sm : int
        Bytes of shared memory of a multiprocessor; each resident block takes 1 KiB beyond its own.
    l2_bytes : int
        Size of the L2 cache.
    """

    name: str
    arch: int
    num_sms: int
    shared_per_block: int
    shared_per_sm: int
    l2_bytes: int


def _kib(name: str, arch: int, num_sms: int, per_block: int, per_sm: int, l2_mib: int) -> Device:
    return Device(name, arch, num_sms, per_block * 1024, per_sm * 1024, l2_mib << 20)


# Multiprocessors and L2: the vendor's data sheets and architecture papers. Shared memory: CUDA C++ Programming Guide,
# table "Technical Specifications per Compute Capability".
NAMED_DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _kib("A100", 80, 108, 163, 164, 40),
        _kib("RTX 3090", 86, 82, 99, 100, 6),
        _kib("RTX 4090", 89, 128, 99, 100, 72),
        _kib("L40S", 89, 142, 99, 100, 96),
        _kib("H100", 90, 132, 227, 228, 50),
        _kib("H200", 90, 132, 227, 228, 50),
        _kib("B200", 100, 148, 227, 228, 126),
        _kib("RTX 5090", 120, 170, 99, 100, 96),
    )
}


def named_device(name: str) -> Device:
    """The device of that name.

    Raises
    ------
    ValueError
        If the name is not in the table; the message lists it.
    """
    try:
        return NAMED_DEVICES[name]
    except (KeyError, TypeError):
        raise ValueError(f"device must be one of {', '.join(NAMED_DEVICES)}; got {name!r}") from None


@functools.cache
def cuda_device(device_id: int) -> Device:
    """The CUDA device with this number.

    Raises
    ------
    RuntimeError
        If its compute capability is below 8.0.
    """
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    name = properties["name"].decode()
    arch = properties["major"] * 10 + properties["minor"]
    if arch < MIN_ARCH:
        raise RuntimeError(
            f"CUDA device {device_id} ({name}) has compute capability {arch // 10}.{arch % 10}; cupy_fa2 needs 8.0 or "
            "later (A100, RTX 30 series and newer), for cp.async and bfloat16 tensor cores. "
            "NumPy arrays run in the simulator on any machine"
        )
    return Device(
        name,
        arch,
        properties["multiProcessorCount"],
        properties["sharedMemPerBlockOptin"],
        properties["sharedMemPerMultiprocessor"],
        properties["l2CacheSize"],
    )
