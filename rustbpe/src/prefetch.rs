//! Tells the processor what will be read soon. Results stay the same; only the waiting for memory gets shorter.

/// Start loading an item into the cache. An index without an item is ignored.
#[inline(always)]
pub fn prefetch<T>(items: &[T], index: usize) {
    if let Some(item) = items.get(index) {
        let address: *const T = item;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: this is only a hint, the address belongs to a live item, and SSE is part of x86_64.
        unsafe {
            use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
            _mm_prefetch::<_MM_HINT_T0>(address.cast());
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: this is only a hint, the address belongs to a live item, and nothing is written.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = address;
    }
}
