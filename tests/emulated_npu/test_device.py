"""The emulated NPU as a device of PyTorch: tensors, memory, streams, generators, deferred copies, and their errors."""

import io
import os

import pytest
import torch
import torch.nn.functional as F

from tests.emulated_npu.worker import on_npu
from tests.support.tensors import draw

NPU = "npu:0"


@on_npu()
def test_arithmetic_gives_the_cpus_bits() -> None:
    a, b = draw(5, 7), draw(7, 3, seed=1)
    for function in (lambda x, y: x @ y, lambda x, y: torch.softmax(x @ y, -1), lambda x, y: (x @ y).exp().cumsum(0)):
        assert torch.equal(function(a.to(NPU), b.to(NPU)).cpu(), function(a, b))
    got = a.to(NPU)
    assert got.device == torch.device(NPU)
    assert got.is_npu  # type: ignore[attr-defined]


@on_npu()
def test_views_share_memory_and_in_place_changes_show_in_them() -> None:
    base = torch.zeros(4, 6, device=NPU)
    view = base[1:3].T
    view += 1
    base.view(-1)[0] = 5
    assert view.data_ptr() == base[1:3].data_ptr()
    assert base.cpu().tolist() == [[5, 0, 0, 0, 0, 0], [1] * 6, [1] * 6, [0] * 6]
    assert base.unsqueeze_(0).shape == (1, 4, 6)
    assert torch.add(base, 1, out=torch.empty(0, device=NPU)).shape == (1, 4, 6)


@on_npu()
def test_gradients_are_the_cpus() -> None:
    grads = []
    for device in ("cpu", NPU):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(device)
        F.cross_entropy(model(draw(5, 8).to(device)), torch.arange(5, device=device) % 4).backward()
        grads.append([parameter.grad.cpu() for parameter in model.parameters()])  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@on_npu()
def test_a_tensor_can_be_printed() -> None:
    assert repr(torch.tensor([1.5, 2.0], device=NPU)) == "tensor([1.5000, 2.0000], device='npu:0')"


@on_npu()
def test_convolution_and_its_gradients_are_the_cpus() -> None:
    results = []
    for device in ("cpu", NPU):
        x, w = draw(2, 3, 8, 8).to(device).requires_grad_(), draw(4, 3, 3, 3, seed=1).to(device).requires_grad_()
        y = F.conv2d(x, w, torch.ones(4, device=device), padding=1)
        y.square().sum().backward()
        results.append([t.detach().cpu() for t in (y, x.grad, w.grad)])  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_npu()
def test_moving_a_module_keeps_its_parameters_and_tied_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    before = model[0].weight
    model.to(NPU)
    assert model[0].weight is before
    assert model[1].weight is before
    assert before.device == torch.device(NPU)


@on_npu()
def test_saved_tensors_load_on_the_device_or_elsewhere() -> None:
    file = io.BytesIO()
    torch.save({"a": draw(3).to("npu:1")}, file)
    for where in (None, "cpu", "npu:0"):
        file.seek(0)
        loaded = torch.load(file, map_location=where)["a"]
        assert loaded.device == torch.device(where or "npu:1")
        assert torch.equal(loaded.cpu(), draw(3))


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
def test_numbers_on_the_host_and_indices_on_the_host_are_taken() -> None:
    x = torch.arange(6.0, device=NPU)
    assert (x + torch.tensor(1.0)).device == x.device
    assert x[torch.tensor([1, 3])].tolist() == [1, 3]
    x[torch.tensor([True, False] * 3)] = 9
    assert x.tolist() == [9, 1, 9, 3, 9, 5]
    assert torch.ones(2, device="npu:1").to("npu:0").device == torch.device("npu:0")


@on_npu()
def test_a_device_that_does_not_exist_is_refused() -> None:
    assert torch.npu.device_count() == 2
    with pytest.raises(RuntimeError, match="Invalid device ID 2"):
        torch.ones(1, device="npu:2")
    with pytest.raises(RuntimeError, match="Invalid device ID 5"):
        torch.npu.set_device(5)


@on_npu(devices=4, ASCEND_RT_VISIBLE_DEVICES="0,2,9,1")
def test_visible_devices_end_at_the_first_that_does_not_exist() -> None:
    assert torch.npu.device_count() == 2


@on_npu()
def test_each_thread_has_its_current_device_and_contexts_restore_it() -> None:
    with torch.npu.device(1):
        assert torch.npu.current_device() == 1
        assert torch.ones(1, device="npu").device == torch.device("npu:1")
    assert torch.npu.current_device() == 0


@on_npu()
def test_random_numbers_follow_each_devices_seed() -> None:
    torch.manual_seed(7)
    first = [torch.rand(3, device=f"npu:{i}").cpu() for i in range(2)]
    assert torch.equal(first[0], first[1])  # both devices had the same seed
    again = torch.rand(3, device="npu:0").cpu()
    assert not torch.equal(again, first[0])
    state = torch.npu.get_rng_state(0)
    drawn = torch.rand(3, device="npu:0")
    torch.npu.set_rng_state(state, 0)
    assert torch.equal(torch.rand(3, device="npu:0"), drawn)
    own = torch.Generator(device=NPU).manual_seed(3)
    assert torch.equal(
        torch.rand(4, device=NPU, generator=own).cpu(), torch.rand(4, generator=torch.Generator().manual_seed(3))
    )


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
def test_events_measure_time() -> None:
    begin, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    begin.record()
    end.record()
    assert begin.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="enable_timing"):
        torch.npu.Event().elapsed_time(end)


@on_npu()
def test_autocast_computes_matrix_products_in_half_precision() -> None:
    a = draw(4, 4).to(NPU)
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert F.softmax(a @ a, -1).dtype == torch.float32
    assert (a @ a).dtype == torch.float32


@on_npu()
def test_optimizers_and_grad_scaler_do_what_they_do_on_the_cpu() -> None:
    results = []
    for device in ("cpu", NPU):
        weight = torch.nn.Parameter(draw(6, 6).to(device))
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=16.0, growth_interval=1)
        for bad in (False, True, False):
            loss = (weight * (float("inf") if bad else 1.0)).square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((weight.detach().cpu(), scaler.get_scale()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == 32.0


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
