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

/// An empty vector with room for `number` items, whose memory the system is asked to map in large pages: a large table
/// that is read at random is then found faster, and the system has fewer pages to clear.
pub fn in_large_pages<T>(number: usize) -> Vec<T> {
    let items: Vec<T> = Vec::with_capacity(number);
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 1 << 12;
        let start = (items.as_ptr() as usize).next_multiple_of(PAGE);
        let end = (items.as_ptr() as usize + number * size_of::<T>()) / PAGE * PAGE;
        if end > start {
            // SAFETY: this is only advice, the range is within memory that the vector owns, and nothing is written. If
            // the system does not follow it, the pages stay small.
            unsafe {
                libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE);
            }
        }
    }
    items
}
