//! How many threads to use.

/// One per core that this process may use, or `RAYON_NUM_THREADS`, the variable that karpathy/rustbpe obeys.
pub fn threads() -> usize {
    let asked = std::env::var("RAYON_NUM_THREADS").ok().and_then(|number| number.parse().ok());
    match asked {
        Some(number) if number > 0 => number,
        _ => std::thread::available_parallelism().map_or(1, usize::from),
    }
}
