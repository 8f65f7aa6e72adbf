//! From the core to Python: errors, arrays, and work without the interpreter's lock.

use std::panic::{catch_unwind, AssertUnwindSafe};

use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::{Encoded, Error, Pair};

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Stopped => PyKeyboardInterrupt::new_err(()),
            error => PyValueError::new_err(error.to_string()),
        }
    }
}

/// An error in one of many texts.
pub fn in_item(error: Error, name: &str) -> PyErr {
    PyValueError::new_err(format!("{name}: {error}"))
}

/// Run `work` without holding the interpreter. A panic, which would be a mistake in this crate, becomes an exception.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    py.detach(|| catch_unwind(AssertUnwindSafe(work)))
        .map_err(|_| PyRuntimeError::new_err("internal error in rustbpe, see standard error; please report it"))
}

/// A writable numpy array over these bytes.
pub fn array<'py>(py: Python<'py>, bytes: Vec<u8>, dtype: &str) -> PyResult<Bound<'py, PyAny>> {
    over(py, PyByteArray::new(py, &bytes), dtype)
}

fn over<'py>(py: Python<'py>, buffer: Bound<'py, PyByteArray>, dtype: &str) -> PyResult<Bound<'py, PyAny>> {
    let numpy = py.import("numpy")?;
    numpy.call_method1("frombuffer", (buffer, numpy.getattr(dtype)?))
}

/// Ids one after another, uint16 if the vocabulary fits in it, else uint32.
pub fn id_array<'py>(py: Python<'py>, parts: &[&[u32]], vocab_size: u32) -> PyResult<Bound<'py, PyAny>> {
    let number: usize = parts.iter().map(|part| part.len()).sum();
    let ids = parts.iter().flat_map(|part| part.iter());
    let (dtype, width) = if vocab_size <= 1 << 16 { ("uint16", 2) } else { ("uint32", 4) };
    let buffer = PyByteArray::new_with(py, number * width, |bytes| {
        if width == 2 {
            bytes
                .as_chunks_mut::<2>()
                .0
                .iter_mut()
                .zip(ids)
                .for_each(|(place, &id)| *place = (id as u16).to_ne_bytes());
        } else {
            let places = bytes.chunks_exact_mut(4).zip(ids);
            places.for_each(|(place, &id)| place.copy_from_slice(&id.to_ne_bytes()));
        }
        Ok(())
    })?;
    over(py, buffer, dtype)
}

/// Where each text's ids end, over all parts.
pub fn ends_array<'py>(py: Python<'py>, parts: &[Encoded]) -> PyResult<Bound<'py, PyAny>> {
    let mut bytes = Vec::new();
    let mut before = 0;
    for part in parts {
        bytes.extend(part.ends.iter().flat_map(|&end| ((before + end) as u64).to_ne_bytes()));
        before += part.ids.len();
    }
    array(py, bytes, "uint64")
}

/// Merges as bytes, for pickles and arrays.
pub fn merge_bytes(merges: &[Pair]) -> Vec<u8> {
    merges.iter().flat_map(|&(left, right)| [left.to_ne_bytes(), right.to_ne_bytes()]).flatten().collect()
}
