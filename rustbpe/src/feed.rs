//! Threads that count texts while the caller reads the next ones.

use std::sync::mpsc::{channel, sync_channel, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{spawn, JoinHandle};

use crate::{Error, PieceCounts, Splitter};

/// Some texts in one string.
#[derive(Default)]
pub struct Batch {
    /// The number of its first text among all texts.
    pub first: usize,
    pub text: String,
    /// Where each text ends.
    pub ends: Vec<usize>,
}

impl Batch {
    pub fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len());
    }

    /// The text at an index of this batch.
    pub fn text(&self, index: usize) -> &str {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.text[start..self.ends[index]]
    }

    /// Remove the texts and keep the memory. The next text will have the number `first`.
    pub fn clear(&mut self, first: usize) {
        self.first = first;
        self.text.clear();
        self.ends.clear();
    }
}

/// The number of the text that failed, and its error.
pub type Failure = (usize, Error);

/// Threads that take batches from one queue; each counts into its own table.
pub struct Feed {
    queue: Option<SyncSender<Batch>>,
    done: Receiver<Batch>,
    threads: Vec<JoinHandle<Result<PieceCounts, Failure>>>,
}

impl Feed {
    /// Start the threads. They end when the feed is finished or dropped.
    pub fn new(splitter: &Splitter, threads: usize) -> Self {
        let (queue, batches) = sync_channel::<Batch>(1);
        let (give_back, done) = channel();
        let batches = Arc::new(Mutex::new(batches));
        let worker = |_| {
            let (splitter, batches, give_back) = (splitter.clone(), Arc::clone(&batches), give_back.clone());
            spawn(move || {
                let mut counts = PieceCounts::new();
                loop {
                    let next = batches.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(batch) = next else { return Ok(counts) };
                    for index in 0..batch.ends.len() {
                        counts.add_text(batch.text(index), &splitter).map_err(|error| (batch.first + index, error))?;
                    }
                    let _ = give_back.send(batch); // while the feed finishes, nobody takes it back
                }
            })
        };
        Self { queue: Some(queue), done, threads: (0..threads.max(1)).map(worker).collect() }
    }

    /// Send a batch and get an empty one. Blocks while all threads are busy and another batch is waiting.
    ///
    /// Returns None if a text has failed; `finish` tells which.
    pub fn send(&mut self, batch: Batch) -> Option<Batch> {
        let next = batch.first + batch.ends.len();
        if self.threads.iter().any(JoinHandle::is_finished) {
            return None; // a thread only ends early after a failure
        }
        self.queue.as_ref()?.send(batch).ok()?;
        let mut empty = self.done.try_recv().unwrap_or_default();
        empty.clear(next);
        Some(empty)
    }

    /// All counts, or the first text that failed. The number of threads does not matter: batches are taken in order,
    /// and every batch before a failing one is counted completely.
    pub fn finish(mut self) -> Result<PieceCounts, Failure> {
        self.queue = None;
        let mut all: Vec<PieceCounts> = Vec::new();
        let mut failures = Vec::new();
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(Ok(counts)) => all.push(counts),
                Ok(Err(failure)) => failures.push(failure),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        if let Some(first) = failures.into_iter().min_by_key(|(text, _)| *text) {
            return Err(first);
        }
        all.sort_by_key(PieceCounts::len); // the smaller tables are added to the largest
        let mut sum = all.pop().unwrap_or_default();
        while let Some(counts) = all.pop() {
            sum.add_all(&counts);
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::GPT4_PATTERN;

    fn batches(texts: &[String], each: usize) -> Vec<Batch> {
        let mut first = 0;
        let some = |texts: &[String]| {
            let mut batch = Batch { first, ..Batch::default() };
            texts.iter().for_each(|text| batch.push(text));
            first += texts.len();
            batch
        };
        texts.chunks(each).map(some).collect()
    }

    fn counted(
        texts: &[String],
        pattern: &str,
        threads: usize,
        each: usize,
    ) -> Result<BTreeMap<Vec<u8>, u64>, Failure> {
        let mut feed = Feed::new(&Splitter::new(pattern).unwrap(), threads);
        for batch in batches(texts, each) {
            let next = batch.first + batch.ends.len();
            let Some(empty) = feed.send(batch) else { break };
            assert_eq!((empty.first, empty.text.len(), empty.ends.len()), (next, 0, 0));
        }
        let mut map = BTreeMap::new();
        feed.finish()?.for_each(|piece, count| assert_eq!(map.insert(piece.to_vec(), count), None));
        Ok(map)
    }

    #[test]
    fn counts_do_not_depend_on_threads_or_batches() {
        let texts: Vec<String> = (0..500).map(|n| format!("text {n} 说 {} 一二三四五六七八", n % 7)).collect();
        let alone = counted(&texts, GPT4_PATTERN, 1, 500).unwrap();
        assert_eq!(alone["text".as_bytes()], 500);
        for (threads, each) in [(2, 1), (4, 7), (3, 100)] {
            assert_eq!(counted(&texts, GPT4_PATTERN, threads, each).unwrap(), alone);
        }
        assert!(counted(&[], GPT4_PATTERN, 2, 1).unwrap().is_empty());
    }

    #[test]
    fn the_first_failing_text_is_named() {
        let mut texts = vec!["ab".repeat(1000); 300];
        for bad in [57, 120, 299] {
            texts[bad].push('!');
        }
        for threads in [1, 2, 4] {
            let failed = counted(&texts, "a|b", threads, 3);
            assert_eq!(failed, Err((57, Error::NotCovered { character: 2000, excerpt: "!".into() })));
        }
    }
}
