"""An NPU for tests on a machine that has none: PyTorch's PrivateUse1 device on host memory, under the name `npu`.

Run any command on it:

    python -m tests.emulated_npu [--chip 910A|910B3|910_93xx|310P] [--devices N] -- CMD...

The command finds a stub package `torch_npu` first on its PYTHONPATH, a driver, a CANN root, device files and an
`npu-smi` of a pretended host; it must not know that they are emulated. What the command line sets is read from the
environment by the stub: NANOCHAT_EMULATED_NPU_{LIBRARY,CHIP,DEVICES,MEMORY,STRICT,DEFERRED}.

The pieces: build.py compiles csrc/*.cpp once; stub/torch_npu is the package; chips.py says what each chip has;
host.py makes the pretended host; log.py counts what reaches the device:

    from emulated_npu import log          # from the tests; `from tests.emulated_npu import log` elsewhere
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
`log.record()` may be nested and covers all threads of the process. A multi-tensor operator (`_fused_adamw`,
`_foreach_*`) counts as one kernel for each tensor of its first list, as the real package launches them.
"""
