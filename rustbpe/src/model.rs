//! A trained encoding: the vocabulary, the split pattern, and the working memory of threads.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::encode::{encode, Scratch};
use crate::feed::Failure;
use crate::{Error, Pair, Splitter, Vocabulary};

/// The default size of each thread's cache, in bytes.
pub const CACHE_BYTES: usize = 32 << 20;
/// A thread takes texts of about this many bytes at a time.
const GROUP_BYTES: usize = 1 << 16;
/// A long text is encoded in parts of about this many bytes.
const PART_BYTES: usize = 1 << 22;

/// Everything that encoding and decoding need. Threads share it.
pub struct Model {
    vocabulary: Vocabulary,
    /// None before training.
    splitter: Option<Splitter>,
    cache_bytes: usize,
    /// Working memory that no thread is using now.
    idle: Mutex<Vec<Scratch>>,
}

/// The tokens of a few texts, one after another.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// The index of the first text.
    first: usize,
    pub ids: Vec<u32>,
    /// Where each text's tokens end.
    pub ends: Vec<usize>,
}

impl Model {
    pub fn new(vocabulary: Vocabulary, splitter: Option<Splitter>, cache_bytes: usize) -> Self {
        Self { vocabulary, splitter, cache_bytes, idle: Mutex::default() }
    }

    /// The model before training: it knows only the byte values.
    pub fn untrained() -> Result<Self, Error> {
        Ok(Self::new(Vocabulary::new(&[])?, None, 0))
    }

    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The split pattern; None before training.
    pub fn pattern(&self) -> Option<&str> {
        self.splitter.as_ref().map(Splitter::pattern)
    }

    pub fn merges(&self) -> &[Pair] {
        self.vocabulary.merges().pairs()
    }

    /// The tokens of one text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let splitter = self.splitter.as_ref().ok_or(Error::Untrained)?;
        let mut scratch = self.scratch();
        let mut ids = Vec::with_capacity(text.len() / 3);
        encode(&self.vocabulary, splitter, text, &mut scratch, &mut ids)?;
        self.give_back(scratch);
        Ok(ids)
    }

    /// A long text in parts that can be encoded alone: together they have the tokens of the whole text.
    pub fn parts<'t>(&self, text: &'t str) -> Result<impl Iterator<Item = &'t str>, Error> {
        Ok(self.splitter.as_ref().ok_or(Error::Untrained)?.parts(text, PART_BYTES))
    }

    /// Encode many texts on up to `threads` threads. Returns parts of a few texts each, in order, or the first failure.
    pub fn encode_all(&self, texts: &[&str], threads: usize) -> Result<Vec<Encoded>, Failure> {
        let splitter = self.splitter.as_ref().ok_or((0, Error::Untrained))?;
        let groups = groups(texts, GROUP_BYTES);
        let next = AtomicUsize::new(0);
        let work = || {
            let (splitter, mut scratch, mut done) = (splitter.clone(), self.scratch(), Vec::new());
            while let Some(range) = groups.get(next.fetch_add(1, Ordering::Relaxed)) {
                let mut part = Encoded { first: range.start, ..Encoded::default() };
                part.ids.reserve(texts[range.clone()].iter().map(|text| text.len()).sum::<usize>() / 3);
                for index in range.clone() {
                    encode(&self.vocabulary, &splitter, texts[index], &mut scratch, &mut part.ids)
                        .map_err(|error| (index, error))?;
                    part.ends.push(part.ids.len());
                }
                done.push(part);
            }
            self.give_back(scratch);
            Ok(done)
        };
        let mut results: Vec<Result<Vec<Encoded>, Failure>> = Vec::new();
        if threads <= 1 || groups.len() <= 1 {
            results.push(work());
        } else {
            std::thread::scope(|scope| {
                let started: Vec<_> = (0..threads.min(groups.len())).map(|_| scope.spawn(work)).collect();
                for thread in started {
                    results.push(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
                }
            });
        }
        if let Some(first) = results.iter().filter_map(|result| result.as_ref().err()).min_by_key(|(text, _)| *text) {
            return Err(first.clone());
        }
        let mut parts: Vec<_> = results.into_iter().flatten().flatten().collect();
        parts.sort_by_key(|part| part.first);
        Ok(parts)
    }

    /// The bytes of `ids`, one after another. They need not be whole characters.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for (index, &id) in ids.iter().enumerate() {
            if id >= self.vocabulary.size() {
                return Err(Error::UnknownId { index, id, vocab_size: self.vocabulary.size() });
            }
            bytes.extend_from_slice(self.vocabulary.token(id));
        }
        Ok(bytes)
    }

    fn scratch(&self) -> Scratch {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.unwrap_or_else(|| Scratch::new(self.cache_bytes))
    }

    fn give_back(&self, scratch: Scratch) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
    }
}

impl Encoded {
    /// The tokens of each text.
    pub fn texts(&self) -> impl Iterator<Item = &[u32]> {
        let starts = std::iter::once(&0).chain(&self.ends);
        starts.zip(&self.ends).map(|(&start, &end)| &self.ids[start..end])
    }
}

/// Split the indices of texts into ranges with about `bytes` bytes each.
fn groups(texts: &[&str], bytes: usize) -> Vec<Range<usize>> {
    let (mut groups, mut first, mut size) = (Vec::new(), 0, 0);
    for (index, text) in texts.iter().enumerate() {
        size += text.len();
        if size >= bytes || index + 1 == texts.len() {
            groups.push(first..index + 1);
            (first, size) = (index + 1, 0);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GPT4_PATTERN;

    fn model(pattern: &str, merges: &[Pair]) -> Model {
        Model::new(Vocabulary::new(merges).unwrap(), Some(Splitter::new(pattern).unwrap()), 0)
    }

    fn all_of(texts: &[String]) -> Vec<&str> {
        texts.iter().map(String::as_str).collect()
    }

    #[test]
    fn groups_cover_all_texts_once() {
        let long = "x".repeat(30);
        for texts in [vec![], vec![""], vec!["a", &long, "b", &long, ""]] {
            let all: Vec<usize> = groups(&texts, 20).into_iter().flatten().collect();
            assert_eq!(all, (0..texts.len()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn many_texts_equal_one_by_one_for_any_number_of_threads() {
        let model = model(GPT4_PATTERN, &[(97, 98), (228, 189), (257, 160)]);
        let texts: Vec<String> = (0..3000).map(|n| format!("ab {n} 你好 ").repeat(n % 40)).collect();
        let alone: Vec<Vec<u32>> = texts.iter().map(|text| model.encode(text).unwrap()).collect();
        for threads in [0, 1, 2, 5] {
            let all = model.encode_all(&all_of(&texts), threads).unwrap();
            assert_eq!(all.iter().flat_map(Encoded::texts).map(<[u32]>::to_vec).collect::<Vec<_>>(), alone);
        }
        assert_eq!(model.encode_all(&[], 2), Ok(vec![]));
    }

    #[test]
    fn the_first_failing_text_is_named() {
        let mut texts = vec!["ab".repeat(10_000); 60];
        texts[17].push('-');
        texts[59].push('-');
        for threads in [1, 4] {
            let failed = model("a|b", &[]).encode_all(&all_of(&texts), threads);
            assert_eq!(failed, Err((17, Error::NotCovered { character: 20_000, excerpt: "-".into() })));
        }
    }

    #[test]
    fn decoding_gives_the_text_back() {
        let model = model(GPT4_PATTERN, &[(228, 189), (256, 160), (104, 105)]);
        let text = "hi 你好, hi!\n";
        assert_eq!(model.decode(&model.encode(text).unwrap()).unwrap(), text.as_bytes());
        assert_eq!(model.decode(&[256]).unwrap(), [228, 189]);
    }

    #[test]
    fn unknown_ids_are_errors_with_their_place() {
        let failed = model(GPT4_PATTERN, &[(104, 105)]).decode(&[0, 257]);
        assert_eq!(failed, Err(Error::UnknownId { index: 1, id: 257, vocab_size: 257 }));
    }

    #[test]
    fn encoding_before_training_is_an_error() {
        let model = Model::untrained().unwrap();
        assert_eq!(model.encode("a"), Err(Error::Untrained));
        assert_eq!(model.vocabulary().size(), 256);
    }
}
