"""The emulated NPU as a device of PyTorch: tensors, memory, streams, generators, deferred copies, and their errors."""

import os

import pytest
import torch
import torch.nn.functional as F

from tests.emulated_npu.worker import on_npu

NPU = "npu:0"


@on_npu()
def test_tensors_on_different_devices_are_refused() -> None:
    on_0, on_1 = torch.ones(2, device="npu:0"), torch.ones(2, device="npu:1")
    for other, name in ((on_1, "npu:1"), (torch.ones(2), "cpu")):
        for function in (lambda x, y: x + y, torch.dot, lambda x, y: torch.cat([x, y])):
            with pytest.raises(RuntimeError, match=rf"same device, but found at least two devices.*{name}"):
                function(on_0, other)
    with pytest.raises(RuntimeError, match="at least two devices"):
        F.linear(torch.ones(1, 2, device="npu:0"), torch.ones(3, 2))


@on_npu()
def test_a_device_that_does_not_exist_is_refused() -> None:
    assert torch.npu.device_count() == 2
    with pytest.raises(RuntimeError, match="Invalid device ID 2"):
        torch.ones(1, device="npu:2")
    with pytest.raises(RuntimeError, match="Invalid device ID 5"):
        torch.npu.set_device(5)


@on_npu()
def test_memory_is_counted_to_the_byte() -> None:
    start = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    a = torch.empty(1000, device=NPU)
    assert torch.npu.memory_allocated() - start == 4000
    b = a + 1  # results of CPU kernels are counted, too
    assert torch.npu.memory_allocated() - start == 8000
    view = b[10:]
    del a, b
    assert torch.npu.memory_allocated() - start == 4000
    del view
    assert torch.npu.memory_allocated() == start
    assert torch.npu.max_memory_allocated() - start == 8000
    assert torch.npu.mem_get_info() == (64 * 2**30 - start, 64 * 2**30)
    assert torch.npu.memory_stats()["allocated_bytes.all.current"] == start


@on_npu()
def test_a_resized_storage_is_counted_at_its_new_size() -> None:
    start = torch.npu.memory_allocated()
    x = torch.ones(100, device=NPU)
    x.untyped_storage().resize_(0)
    assert torch.npu.memory_allocated() == start
    x.untyped_storage().resize_(400)
    assert torch.npu.memory_allocated() == start + 400
    x.resize_(200)
    assert torch.npu.memory_allocated() == start + 800


@on_npu()
def test_too_much_memory_is_an_npu_out_of_memory_error() -> None:
    start = torch.npu.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match=r"NPU out of memory. Tried to allocate 70.00 GiB \(NPU 0; 64.00"):
        torch.empty(70 << 30, dtype=torch.uint8, device=NPU)
    torch.npu.set_per_process_memory_fraction(0.00001)  # 687 kB
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(512, 512, device=NPU)
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)
    assert torch.npu.memory_allocated() == start


@on_npu()
def test_a_deferred_copy_to_pinned_memory_holds_nan_until_someone_waits() -> None:
    source = torch.arange(4.0, device=NPU)
    for wait in (torch.npu.synchronize, torch.npu.current_stream().synchronize, torch.ones(1, device=NPU).item):
        pinned = torch.zeros(4).pin_memory()
        pinned.copy_(source, non_blocking=True)
        source += 1  # the copy has the values from when it was requested
        assert pinned.isnan().all()
        wait()
        assert torch.equal(pinned, source.cpu() - 1)
    numbers = torch.arange(4, device=NPU).to("cpu", non_blocking=True)  # torch itself pins the target
    assert numbers.is_pinned()
    assert numbers.tolist() != [0, 1, 2, 3]
    torch.npu.synchronize()
    assert numbers.tolist() == [0, 1, 2, 3]
    assert torch.arange(4, device=NPU).cpu().tolist() == [0, 1, 2, 3]


@on_npu()
def test_a_copy_back_comes_after_the_copy_to_pinned_memory() -> None:
    pinned, other = torch.zeros(4).pin_memory(), torch.zeros(4).pin_memory()
    for target in (pinned, other):
        target.copy_(torch.arange(4.0, device=NPU), non_blocking=True)
    with torch.npu.stream(torch.npu.Stream()):
        assert pinned.to(NPU, non_blocking=True).cpu().isnan().all()  # another stream, which waits for nothing
    for target in (pinned, other):
        target.copy_(torch.arange(4.0, device=NPU), non_blocking=True)
    back = pinned.to(NPU, non_blocking=True)
    assert other.isnan().all() or back.cpu().tolist() == [0, 1, 2, 3]
    assert back.cpu().tolist() == [0, 1, 2, 3]


@on_npu()
def test_an_event_waits_for_the_copies_before_it_only() -> None:
    side = torch.npu.Stream()
    first, second = (torch.zeros(2).pin_memory() for _ in range(2))
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side
        first.copy_(torch.ones(2, device=NPU), non_blocking=True)
        event = torch.npu.Event()
        event.record()
        second.copy_(torch.ones(2, device=NPU), non_blocking=True)
    torch.npu.current_stream().synchronize()  # another stream
    assert first.isnan().all()
    event.synchronize()
    assert first.tolist() == [1, 1]
    assert second.isnan().all()
    torch.npu.current_stream().wait_stream(side)
    torch.npu.current_stream().synchronize()
    assert second.tolist() == [1, 1]


@on_npu()
def test_a_forked_child_cannot_use_the_device() -> None:
    torch.ones(1, device=NPU)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device=NPU)
            os.write(write, b"worked")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"must use the 'spawn' start method" in os.read(read, 1000)
