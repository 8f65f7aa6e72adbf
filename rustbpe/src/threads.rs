//! How many threads to use.

/// One thread per core that this process may use, unless `RAYON_NUM_THREADS` says otherwise, as in karpathy/rustbpe.
pub fn threads() -> usize {
    let asked = std::env::var("RAYON_NUM_THREADS").ok().and_then(|number| number.parse().ok());
    match asked {
        Some(number) if number > 0 => number,
        _ => std::thread::available_parallelism().map_or(1, usize::from),
    }
}
