//! Training for Python: handles signals and reports progress while threads work.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::py_output::{detached, in_item};
use crate::{threads, train, Batch, Feed, Pair, Splitter};

/// While merges are learned, Ctrl-C is checked and progress reported this often.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// A training run: fills batches of texts and sends them to the counting threads.
pub struct Training<'py> {
    /// The batch to fill; `send` sends it.
    pub batch: Batch,
    splitter: Splitter,
    feed: Feed,
    progress: Progress<'py>,
}

impl<'py> Training<'py> {
    pub fn new(py: Python<'py>, pattern: &str, progress: Option<Bound<'py, PyAny>>) -> PyResult<Self> {
        let splitter = detached(py, || Splitter::new(pattern))??;
        let feed = Feed::new(&splitter, threads());
        Ok(Self {
            batch: Batch::default(),
            splitter,
            feed,
            progress: Progress { callback: progress, told: Instant::now() },
        })
    }

    /// Send the batch to the threads and replace it by an empty one. False if a text has failed.
    pub fn send(&mut self, py: Python<'py>) -> PyResult<bool> {
        py.check_signals()?;
        let full = std::mem::take(&mut self.batch);
        if self.progress.due() {
            self.progress.tell("read", full.first + full.ends.len())?;
        }
        let feed = &mut self.feed;
        let Some(empty) = detached(py, || feed.send(full))? else { return Ok(false) };
        self.batch = empty;
        Ok(true)
    }

    /// Wait for the counts and learn merges. `name` turns the number of a text into the user's name for it.
    pub fn finish(
        self,
        py: Python<'py>,
        vocab_size: u32,
        name: impl Fn(usize) -> String,
    ) -> PyResult<(Vec<Pair>, Splitter)> {
        let Self { splitter, feed, batch, progress } = self;
        let texts = batch.first;
        let counts = detached(py, || feed.finish())?.map_err(|(index, error)| in_item(error, &name(index)))?;
        progress.tell("read", texts)?;
        let callback = progress.callback.map(Bound::unbind);
        let mut told = Instant::now();
        let mut failure = None;
        let proceed = |merges: usize| {
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                failure = Python::attach(|py| {
                    py.check_signals()?;
                    match &callback {
                        Some(callback) => callback.call1(py, ("merge", merges)).map(drop),
                        None => Ok(()),
                    }
                })
                .err();
            }
            failure.is_none()
        };
        let merges = detached(py, || train(counts, vocab_size, proceed))?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        let merges = merges?;
        if let Some(callback) = &callback {
            callback.call1(py, ("merge", merges.len()))?;
        }
        Ok((merges, splitter))
    }
}

/// The caller's progress function, and when it was last called.
struct Progress<'py> {
    callback: Option<Bound<'py, PyAny>>,
    told: Instant,
}

impl Progress<'_> {
    fn due(&mut self) -> bool {
        let due = self.callback.is_some() && self.told.elapsed() >= TELL_EVERY;
        if due {
            self.told = Instant::now();
        }
        due
    }

    fn tell(&self, stage: &str, done: usize) -> PyResult<()> {
        match &self.callback {
            Some(callback) => callback.call1((stage, done)).map(drop),
            None => Ok(()),
        }
    }
}
