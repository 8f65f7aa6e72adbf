//! The Python module: the core's functions as methods of one class.

use std::sync::{Arc, PoisonError, RwLock};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyType};

use crate::py_input::{file_text, merges_from, token_id, whole_number, OneText, Texts};
use crate::py_output::{array, detached, in_item, merge_bytes, Ids};
use crate::py_train::Training;
use crate::{threads, Encoded, Error, Model, Splitter, Vocabulary, CACHE_BYTES, GPT4_PATTERN, MAX_VOCAB_SIZE};

/// Texts are handed to the counting threads when they fill this much, however many they are.
const BUFFER_BYTES: usize = 1 << 20;
/// Texts are encoded when they fill this much: little, so that they are still in the processor's caches, and the same
/// memory serves again and again.
const ENCODE_BYTES: usize = 1 << 18;
/// For each of many threads, as starting them takes its time.
const THREAD_BYTES: usize = 1 << 20;
/// For all threads, however many they are.
const MOST_BYTES: usize = 64 << 20;

/// What a pickle holds: pattern and merges.
type State<'py> = (Option<String>, Bound<'py, PyBytes>);

/// A byte pair encoding: train it on texts, then encode and decode. Before training it knows the 256 byte values.
#[pyclass(frozen, module = "rustbpe")]
pub struct Tokenizer {
    model: RwLock<Arc<Model>>,
}

#[pymethods]
impl Tokenizer {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self::of(Model::untrained()?))
    }

    /// Learn merges from an iterable of str until there are `vocab_size` tokens, 256 byte values included.
    ///
    /// A text with too few distinct pairs gives fewer tokens: compare `vocab_size` afterwards. Texts are read
    /// `buffer_size` at a time (fewer if they are long) and split by `pattern` (default: GPT-4's), which must cover
    /// them. `progress(stage, done)` is called now and then: ("read", texts) and ("merge", tokens). If anything raises,
    /// the tokenizer stays as it was.
    #[pyo3(signature = (iterator, vocab_size, buffer_size=None, pattern=None, progress=None))]
    #[pyo3(text_signature = "($self, iterator, vocab_size, buffer_size=8192, pattern=None, progress=None)")]
    fn train_from_iterator(
        &self,
        py: Python<'_>,
        iterator: &Bound<'_, PyAny>,
        vocab_size: &Bound<'_, PyAny>,
        buffer_size: Option<&Bound<'_, PyAny>>,
        pattern: Option<&str>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let vocab_size = checked_vocab_size(vocab_size)?;
        let most = match buffer_size {
            Some(given) => whole_number(given, "buffer_size", 1, u64::MAX)?.try_into().unwrap_or(usize::MAX),
            None => 8192,
        };
        let mut training = Training::new(py, pattern.unwrap_or(GPT4_PATTERN), progress)?;
        let mut texts = Texts::new(iterator, "iterator")?;
        while texts.fill(py, &mut training.batch, most, BUFFER_BYTES)? {
            if !training.send(py)? {
                break;
            }
        }
        self.learn(py, training, vocab_size, |index| format!("item {index} of iterator"))
    }

    /// The same from files, each of which is one text in UTF-8.
    #[pyo3(signature = (paths, vocab_size, pattern=None, progress=None))]
    fn train_from_files(
        &self,
        py: Python<'_>,
        paths: Vec<std::path::PathBuf>,
        vocab_size: &Bound<'_, PyAny>,
        pattern: Option<&str>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let vocab_size = checked_vocab_size(vocab_size)?;
        let mut training = Training::new(py, pattern.unwrap_or(GPT4_PATTERN), progress)?;
        for path in &paths {
            training.batch.push(&file_text(py, path)?);
            if training.batch.text.len() >= BUFFER_BYTES && !training.send(py)? {
                break;
            }
        }
        training.send(py)?;
        self.learn(py, training, vocab_size, |index| paths[index].display().to_string())
    }

    /// A tokenizer of known tokens: `tokens[i]` are the bytes of id i, in the order in which they were learned.
    #[classmethod]
    #[pyo3(signature = (tokens, pattern, cache_bytes=CACHE_BYTES))]
    fn from_ranks(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        tokens: Vec<Vec<u8>>,
        pattern: &str,
        cache_bytes: usize,
    ) -> PyResult<Self> {
        let made = || -> Result<Model, Error> {
            Ok(Model::new(Vocabulary::from_tokens(&tokens)?, Some(Splitter::new(pattern)?), cache_bytes))
        };
        Ok(Self::of(detached(py, made)??))
    }

    /// The token ids of `text`. There are no special tokens: their spellings are text like any other.
    fn encode(&self, py: Python<'_>, text: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let text = OneText::new(text)?;
        let (model, text) = (self.model(), text.as_str()?);
        Ok(detached(py, || model.encode(text))??)
    }

    /// The same as `encode`, under tiktoken's name for it.
    fn encode_ordinary(&self, py: Python<'_>, text: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        self.encode(py, text)
    }

    /// The same as a numpy array: uint16 where all ids fit, else uint32.
    fn encode_numpy<'py>(&self, py: Python<'py>, text: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let ids = self.encode(py, text)?;
        let mut array = Ids::new(py, self.vocab_size());
        array.add(&ids, &[])?;
        Ok(array.finish()?.0)
    }

    /// The token ids of each of `texts`, in their order, encoded by as many threads as there are cores.
    #[pyo3(signature = (texts, threads=None))]
    fn batch_encode(
        &self,
        py: Python<'_>,
        texts: &Bound<'_, PyAny>,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let mut lists = Vec::new();
        self.encode_each(py, texts, threads, |parts| {
            for ids in parts.iter().flat_map(Encoded::texts) {
                lists.push(ids.into_pyobject(py)?.into_any().unbind());
            }
            Ok(())
        })?;
        Ok(lists)
    }

    /// The same as two numpy arrays: all ids one after another (uint16 where they fit, else uint32), and where each
    /// text's ids end (uint64).
    #[pyo3(signature = (texts, threads=None))]
    fn batch_encode_numpy<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyAny>,
        threads: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let mut ids = Ids::new(py, self.vocab_size());
        self.encode_each(py, texts, threads, |parts| parts.iter().try_for_each(|part| ids.add(&part.ids, &part.ends)))?;
        ids.finish()
    }

    /// The text of token ids. Raises UnicodeDecodeError if their bytes are not whole characters.
    fn decode<'py>(&self, ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyString>> {
        PyString::from_bytes(ids.py(), &self.bytes_of(ids)?)
    }

    /// The bytes of token ids.
    fn decode_bytes<'py>(&self, ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(ids.py(), &self.bytes_of(ids)?))
    }

    /// The number of tokens: 256 byte values and the learned merges.
    #[getter]
    fn vocab_size(&self) -> u32 {
        self.model().vocabulary().size()
    }

    /// The split pattern; empty before training.
    fn get_pattern(&self) -> String {
        self.model().pattern().unwrap_or_default().to_string()
    }

    /// The bytes and the id of every token, by id: what tiktoken's Encoding wants as a dict.
    fn get_mergeable_ranks(&self, py: Python<'_>) -> Vec<(Py<PyBytes>, u32)> {
        let model = self.model();
        let vocabulary = model.vocabulary();
        (0..vocabulary.size()).map(|id| (PyBytes::new(py, vocabulary.token(id)).unbind(), id)).collect()
    }

    /// The two ids that each token from 256 on was made of, as a numpy array of uint32, (merges, 2).
    fn get_merges<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        array(py, merge_bytes(self.model().merges()), "uint32")?.call_method1("reshape", (-1, 2))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, State<'py>)> {
        let model = slf.get().model();
        let merges = PyBytes::new(slf.py(), &merge_bytes(model.merges()));
        Ok((slf.get_type().getattr("_restore")?, (model.pattern().map(str::to_string), merges)))
    }

    /// What unpickling calls.
    #[classmethod]
    fn _restore(_class: &Bound<'_, PyType>, pattern: Option<&str>, merges: &[u8]) -> PyResult<Self> {
        let vocabulary = Vocabulary::new(&merges_from(merges)?)?;
        Ok(Self::of(Model::new(vocabulary, pattern.map(Splitter::new).transpose()?, CACHE_BYTES)))
    }
}

impl Tokenizer {
    fn of(model: Model) -> Self {
        Self { model: RwLock::new(Arc::new(model)) }
    }

    fn model(&self) -> Arc<Model> {
        Arc::clone(&self.model.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Merge what was counted and take the result on.
    fn learn(
        &self,
        py: Python<'_>,
        training: Training<'_>,
        vocab_size: u32,
        name: impl Fn(usize) -> String,
    ) -> PyResult<()> {
        let (merges, splitter) = training.finish(py, vocab_size, name)?;
        let model = detached(py, || Vocabulary::new(&merges).map(|v| Model::new(v, Some(splitter), CACHE_BYTES)))??;
        *self.model.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(model);
        Ok(())
    }

    /// Hand the tokens of texts to `take`, some megabytes of text at a time.
    fn encode_each(
        &self,
        py: Python<'_>,
        texts: &Bound<'_, PyAny>,
        given: Option<&Bound<'_, PyAny>>,
        mut take: impl FnMut(&[Encoded]) -> PyResult<()>,
    ) -> PyResult<()> {
        let threads = match given {
            Some(given) => whole_number(given, "threads", 1, u64::MAX)?.try_into().unwrap_or(usize::MAX),
            None => threads(),
        };
        let model = self.model();
        let mut texts = Texts::new(texts, "texts")?;
        let bytes = if threads == 1 { ENCODE_BYTES } else { threads.saturating_mul(THREAD_BYTES).min(MOST_BYTES) };
        let mut first = 0;
        loop {
            let held = texts.hold(py, bytes)?;
            if held.is_empty() {
                return Ok(());
            }
            let held: Vec<&str> = held.iter().map(OneText::as_str).collect::<PyResult<_>>()?;
            let parts = detached(py, || model.encode_all(&held, threads))?;
            take(&parts.map_err(|(index, error)| in_item(error, &format!("item {} of texts", first + index)))?)?;
            first += held.len();
        }
    }

    fn bytes_of(&self, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
        let model = self.model();
        let mut known = Vec::new();
        for (index, id) in ids.try_iter()?.enumerate() {
            known.push(token_id(&id?, index, model.vocabulary().size())?);
        }
        Ok(model.decode(&known)?)
    }
}

fn checked_vocab_size(given: &Bound<'_, PyAny>) -> PyResult<u32> {
    let name = "vocab_size (256 byte values and the merges)";
    Ok(whole_number(given, name, crate::BYTES.into(), MAX_VOCAB_SIZE.into())? as u32)
}

#[pymodule]
mod rustbpe {
    #[pymodule_export]
    use super::Tokenizer;
}
