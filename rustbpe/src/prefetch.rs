//! Telling the processor what will be read soon. It changes no result, only how long memory is waited for.

/// Begin to load an item; nothing happens if there is no such item.
#[inline(always)]
pub fn prefetch<T>(items: &[T], index: usize) {
    if let Some(item) = items.get(index) {
        let address: *const T = item;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint; the address is that of a living item, and SSE is part of x86_64.
        unsafe {
            use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
            _mm_prefetch::<_MM_HINT_T0>(address.cast());
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a hint; the address is that of a living item, and nothing is written.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = address;
    }
}
