//! The threads that count and encode.

use std::sync::{Arc, Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

static POOL: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);

/// This process's threads: one per core, or RAYON_NUM_THREADS.
///
/// Rayon's own global pool would hang in a process forked from one that has used it, as multiprocessing's workers
/// are: threads do not survive a fork. So the pool remembers its process, and a child makes its own.
pub fn threads() -> Result<Arc<ThreadPool>, ThreadPoolBuildError> {
    let process = std::process::id();
    let mut slot = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((owner, pool)) = slot.as_ref() {
        if *owner == process {
            return Ok(Arc::clone(pool));
        }
    }
    let name = |index| format!("rustbpe-{index}");
    let pool = Arc::new(ThreadPoolBuilder::new().thread_name(name).build()?);
    if let Some(parents) = slot.replace((process, Arc::clone(&pool))) {
        std::mem::forget(parents); // dropping it would signal threads that are not in this process
    }
    Ok(pool)
}
