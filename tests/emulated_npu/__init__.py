"""An emulated NPU for tests on machines without one: PyTorch's PrivateUse1 device `npu`, in host memory.

Run any command on it:

    python -m tests.emulated_npu [--chip 910A|910B3|910_93xx|310P] [--devices N] -- CMD...

The command finds a stub package `torch_npu` first on its PYTHONPATH, and the driver, CANN root, device files and
`npu-smi` of a fake host under ASCEND_ROOT_PREFIX. The command must not notice that they are emulated. Only the stub
reads NANOCHAT_EMULATED_NPU, a JSON object with the choices of the command line.

The pieces: build.py compiles csrc/*.cpp once; stub/torch_npu is the package; chips.py describes each chip; host.py and
smi.py make the fake host; worker.py runs tests in processes that have the device; log.py counts what reaches the
device:

    from tests.emulated_npu import log
    with log.record() as seen:            # in a process in which `import torch_npu` gave the stub
        step()
    seen.operators        Counter: base name -> kernels that reached the device ("mm", "copy", "npu_rms_norm", ...);
                          views, allocations and reshapes are not counted; in-place, out= and overloads share a name
    seen.launches         the sum of seen.operators
    seen.by_phase         {"forward": Counter, "backward": Counter}: autograd's threads launch the backward
    seen.synchronisations Counter: what made the host wait -> how often ("item", "copy to host", "synchronize", ...)
    seen.copies           Counter: "host to device", "device to host", "device to device" (another device) -> how often
    seen.copied_bytes     Counter with the same keys -> bytes
    seen.unsupported      Counter: operators missing from the real package's lists, which would run on the CPU
    seen.collectives      Counter: "allreduce", "_allgather_base", ... -> how often
`log.record()` may be nested, and it covers all threads of the process. Multi-tensor operators count as many kernels as
the real package launches: one per tensor for `_fused_adamw` and `_amp_foreach_*`, one per 48 tensors for `_foreach_*`.
On 910A and 310P, and for overloads that are missing from its lists (`_foreach_mul.Tensor`), it is one per tensor.
Reading a number ("item") is a synchronisation, not a copy.
"""
