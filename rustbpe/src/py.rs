//! The Python module: one class whose methods call the core.

use std::sync::{Arc, PoisonError, RwLock};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyType};

use crate::py_input::{all_tokens, file_text, merges_from, token_id, whole_number, OneText, Texts};
use crate::py_list::Lists;
use crate::py_output::{array, detached, in_item, merge_bytes, Ids};
use crate::py_train::Training;
use crate::{threads, Encoded, Error, Model, Splitter, Vocabulary, CACHE_BYTES, GPT4_PATTERN, MAX_VOCAB_SIZE};

/// A batch of texts goes to the counting threads when it has this many bytes, however many texts it holds.
const BUFFER_BYTES: usize = 1 << 20;
/// With one thread, texts are encoded in groups of this many bytes: few, so that they stay in the processor's caches
/// and their memory is used again.
const ENCODE_BYTES: usize = 1 << 18;
/// With several threads, the bytes per thread: more, because starting threads takes time.
const THREAD_BYTES: usize = 1 << 20;
/// The most bytes per group, for any number of threads.
const MOST_BYTES: usize = 64 << 20;

/// What a pickle holds: the pattern and the merges.
type State<'py> = (Option<String>, Bound<'py, PyBytes>);

/// A byte pair encoding: train it on texts, then encode and decode. Before training it only knows the 256 byte values.
#[pyclass(frozen, module = "rustbpe")]
pub struct Tokenizer {
    model: RwLock<Arc<Model>>,
    lists: Lists,
}

#[pymethods]
impl Tokenizer {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self::of(Model::untrained()?))
    }

    /// Learn merges from an iterable of str until there are `vocab_size` tokens, including the 256 byte values.
    ///
    /// Texts with too few distinct pairs give fewer tokens: compare `vocab_size` afterwards. Texts are read
    /// `buffer_size` at a time (fewer if they are long) and split by `pattern` (default: GPT-4's), which must match all
    /// of their characters. `progress(stage, done)` is called about ten times a second, as ("read", texts so far) and
    /// ("merge", merges so far). If anything raises, the tokenizer does not change.
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

    /// Like `train_from_iterator`, but reads files; each file is one text in UTF-8.
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

    /// Make a tokenizer from known tokens: `tokens[i]` are the bytes of id i, and ids are in the order learned.
    #[classmethod]
    #[pyo3(signature = (tokens, pattern, cache_bytes=CACHE_BYTES))]
    fn from_ranks(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        pattern: &str,
        cache_bytes: usize,
    ) -> PyResult<Self> {
        let tokens = all_tokens(tokens)?;
        let made = || -> Result<Model, Error> {
            Ok(Model::new(Vocabulary::from_tokens(tokens)?, Some(Splitter::new(pattern)?), cache_bytes))
        };
        Ok(Self::of(detached(py, made)??))
    }

    /// The token ids of `text`. There are no special tokens: text that looks like one is encoded like any other text.
    fn encode<'py>(&self, py: Python<'py>, text: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let mut all: Option<Bound<'py, PyList>> = None;
        let model = self.model();
        let vocab_size = model.vocabulary().size();
        self.encode_parts(&model, py, text, |ids| {
            let list = self.lists.of(py, &ids, vocab_size)?;
            match &all {
                Some(all) => all.set_slice(all.len(), all.len(), list.as_any())?,
                None => all = Some(list),
            }
            Ok(())
        })?;
        Ok(all.unwrap_or_else(|| PyList::empty(py)))
    }

    /// The same as `encode`, under the name that tiktoken uses.
    fn encode_ordinary<'py>(&self, py: Python<'py>, text: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        self.encode(py, text)
    }

    /// Like `encode`, but returns a numpy array: uint16 if all ids of the vocabulary fit, else uint32.
    fn encode_numpy<'py>(&self, py: Python<'py>, text: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let model = self.model();
        let mut array = Ids::new(py, model.vocabulary().size());
        self.encode_parts(&model, py, text, |ids| array.add(&ids, &[]))?;
        Ok(array.finish()?.0)
    }

    /// The token ids of each of `texts`, in order. Encodes on `threads` threads, by default one per core.
    #[pyo3(signature = (texts, threads=None))]
    fn batch_encode(
        &self,
        py: Python<'_>,
        texts: &Bound<'_, PyAny>,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Py<PyList>>> {
        let mut lists = Vec::new();
        let model = self.model();
        let vocab_size = model.vocabulary().size();
        self.encode_each(&model, py, texts, threads, |parts| {
            for ids in parts.iter().flat_map(Encoded::texts) {
                lists.push(self.lists.of(py, ids, vocab_size)?.unbind());
            }
            Ok(())
        })?;
        Ok(lists)
    }

    /// Like `batch_encode`, but returns two numpy arrays: the ids of all texts one after another (uint16 if all ids of
    /// the vocabulary fit, else uint32), and where each text's ids end (uint64).
    #[pyo3(signature = (texts, threads=None))]
    fn batch_encode_numpy<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyAny>,
        threads: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let model = self.model();
        let mut ids = Ids::new(py, model.vocabulary().size());
        self.encode_each(&model, py, texts, threads, |parts| {
            parts.iter().try_for_each(|part| ids.add(&part.ids, &part.ends))
        })?;
        ids.finish()
    }

    /// The text of these token ids. Raises UnicodeDecodeError if their bytes are not UTF-8.
    fn decode<'py>(&self, ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyString>> {
        PyString::from_bytes(ids.py(), &self.bytes_of(ids)?)
    }

    /// The bytes of these token ids, one after another.
    fn decode_bytes<'py>(&self, ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(ids.py(), &self.bytes_of(ids)?))
    }

    /// The number of tokens: the 256 byte values and the learned merges.
    #[getter]
    fn vocab_size(&self) -> u32 {
        self.model().vocabulary().size()
    }

    /// The split pattern; empty before training.
    fn get_pattern(&self) -> String {
        self.model().pattern().unwrap_or_default().to_string()
    }

    /// The bytes and the id of every token, in the order of ids. As a dict, tiktoken's Encoding takes it.
    fn get_mergeable_ranks(&self, py: Python<'_>) -> Vec<(Py<PyBytes>, u32)> {
        let model = self.model();
        let vocabulary = model.vocabulary();
        (0..vocabulary.size()).map(|id| (PyBytes::new(py, vocabulary.token(id)).unbind(), id)).collect()
    }

    /// The two ids that each token from 256 on is made of, as a numpy array of uint32, (merges, 2).
    fn get_merges<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        array(py, merge_bytes(self.model().merges()), "uint32")?.call_method1("reshape", (-1, 2))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, State<'py>)> {
        let model = slf.get().model();
        let merges = PyBytes::new(slf.py(), &merge_bytes(model.merges()));
        Ok((slf.get_type().getattr("_restore")?, (model.pattern().map(str::to_string), merges)))
    }

    /// Unpickling calls this.
    #[classmethod]
    fn _restore(_class: &Bound<'_, PyType>, pattern: Option<&str>, merges: &[u8]) -> PyResult<Self> {
        let vocabulary = Vocabulary::new(&merges_from(merges)?)?;
        Ok(Self::of(Model::new(vocabulary, pattern.map(Splitter::new).transpose()?, CACHE_BYTES)))
    }
}

impl Tokenizer {
    fn of(model: Model) -> Self {
        Self { model: RwLock::new(Arc::new(model)), lists: Lists::default() }
    }

    fn model(&self) -> Arc<Model> {
        Arc::clone(&self.model.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Learn merges from the counts, and make the result this tokenizer's model.
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

    /// Encode texts, and hand the tokens of one group of texts after another to `take`.
    fn encode_each(
        &self,
        model: &Model,
        py: Python<'_>,
        texts: &Bound<'_, PyAny>,
        given: Option<&Bound<'_, PyAny>>,
        mut take: impl FnMut(&[Encoded]) -> PyResult<()>,
    ) -> PyResult<()> {
        let threads = match given {
            Some(given) => whole_number(given, "threads", 1, u64::MAX)?.try_into().unwrap_or(usize::MAX),
            None => threads(),
        };
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

    /// Encode a text, and hand the tokens of one part after another to `take`.
    fn encode_parts(
        &self,
        model: &Model,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        mut take: impl FnMut(Vec<u32>) -> PyResult<()>,
    ) -> PyResult<()> {
        let text = OneText::new(text)?;
        for part in model.parts(text.as_str()?)? {
            take(detached(py, || model.encode(part))??)?;
        }
        Ok(())
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
