"""An NPU for tests on a machine that has none: PyTorch's PrivateUse1 device on host memory, under the name `npu`.

Run any command on it:

    python -m tests.emulated_npu [--chip 910A|910B3|910_93xx|310P] [--devices N] -- CMD...

The command finds a stub package `torch_npu` first on its PYTHONPATH, a driver, a CANN root, device files and an
`npu-smi` of a pretended host (under ASCEND_ROOT_PREFIX); it must not know that they are emulated. Only the stub reads
NANOCHAT_EMULATED_NPU, a JSON object in which the command line's choices are.

The pieces: build.py compiles csrc/*.cpp once; stub/torch_npu is the package; chips.py says what each chip has;
host.py and smi.py make the pretended host; worker.py runs tests in processes that have the device; log.py counts what
reaches the device:

    from tests.emulated_npu import log          # from the tests; `from tests.emulated_npu import log` elsewhere
    with log.record() as seen:            # in a process in which `import torch_npu` gave the stub
        step()
    seen.operators        Counter: base name -> kernels that reached the device ("mm", "copy", "npu_rms_norm", ...);
                          views, allocations and changes of shape are none; in-place, out= and overloads are one name
    seen.launches         their sum
    seen.by_phase         {"forward": Counter, "backward": Counter}: backward is what autograd's threads launched
    seen.synchronisations Counter: what made the host wait -> times ("item", "copy to host", "synchronize", ...)
    seen.copies           Counter: "host to device", "device to host", "device to device" (another device) -> times
    seen.copied_bytes     Counter of the same keys
    seen.unsupported      Counter: operators that the real package's lists lack and that would run on the CPU
    seen.collectives      Counter: "allreduce", "_allgather_base", ... -> times
`log.record()` may be nested and covers all threads of the process. Multi-tensor operators count as the real package
launches them: `_fused_adamw` and `_amp_foreach_*` a kernel for each tensor, `_foreach_*` one for each 48 tensors; but
on 910A and 310P, and in the overloads that its lists lack (`_foreach_mul.Tensor`), one for each tensor.
Reading a number ("item") is a synchronisation and no copy.
"""
