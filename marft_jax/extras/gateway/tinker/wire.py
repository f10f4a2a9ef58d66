"""The format of the wire: bodies to the SDK's own types and to arrays, and answers back to bytes.

An answer is bytes of JSON or of protobuf; no message of this API begins with a brace in protobuf.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from marft_jax.errors import BadInput, described, one_line, reason
from marft_jax.extras.gateway.errors import ApiError

_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int64}
_MOST_CELLS = 1 << 24  # of a sparse tensor


class Given(NamedTuple):
    """A datum of a client: token ids, and tensors by name."""

    ids: np.ndarray
    inputs: dict[str, np.ndarray]


class Pass(NamedTuple):
    """A forward pass, and a backward pass behind it unless it is ``forward_only``."""

    model_id: str
    seq_id: int
    data: list[Given]
    loss: str
    settings: dict[str, float | str]
    forward_only: bool


def read_pass(body: bytes) -> Pass:
    """Reads the body of a ``forward_backward``; raises ``ApiError``, 422."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
        data = [*map(_given, message.data)]
    except (DecodeError, ValueError) as error:
        what = "expected a ForwardBackwardRequest as protobuf, of text and dense or CSR tensors"
        raise ApiError(422, one_line(f"{what}: {error}")) from None
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        settings[name] = value.text if value.HasField("text") else value.number
    which = message.model_id, message.seq_id
    return Pass(*which, data, message.loss_fn, settings, message.forward_only)


def _given(message: pb.Datum) -> Given:
    if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in message.model_input):
        raise ValueError("images and audio are not offered: expected encoded_text chunks")
    ids = b"".join(chunk.encoded_text.tokens for chunk in message.model_input)
    # spans of provenance are for stable_reinforce, which is not offered
    inputs = {name: _tensor(tensor) for name, tensor in message.loss_fn_inputs.items()}
    return Given(np.frombuffer(ids, np.int32), inputs)


def _tensor(message: pb.Tensor) -> np.ndarray:
    if message.dtype not in _DTYPES:
        raise ValueError(f"expected a tensor of float32 or int64, got type {message.dtype}")
    kind = np.int32 if message.dtype == pb.DTYPE_INT32 else _DTYPES[message.dtype]
    csr, places = message.sparse_csr, None
    if message.HasField("sparse_csr"):
        places = [np.frombuffer(x, np.int64) for x in (csr.crow_indices, csr.col_indices)]
    values = np.frombuffer(csr.values if places else message.dense, kind)
    return dense(values.astype(_DTYPES[message.dtype]), list(message.shape), places)


def dense(
    values: np.ndarray, shape: Sequence[int], places: Sequence[np.ndarray] | None, empty: int = 0
) -> np.ndarray:
    """A tensor in its shape.

    Args:
        places: of a CSR matrix, where rows begin and the column of each value.
        empty: the value of what a CSR matrix does not list.

    Raises:
        BadInput: the values do not fit.
    """
    if places is None and math.prod(shape or [len(values)]) == len(values):
        return values.reshape(shape or -1)
    rows, columns = places or (np.zeros(0, int), np.zeros(0, int))
    fits = len(shape) == 2 and len(rows) == shape[0] + 1 and math.prod(shape) <= _MOST_CELLS
    fits = fits and rows[0] == 0 and rows[-1] == len(columns) == len(values)
    if not fits or (np.diff(rows) < 0).any() or not ((columns >= 0) & (columns < shape[1])).all():
        raise BadInput(f"a tensor: expected as many values as its shape has, got {shape!s:.80}")
    matrix = np.full(shape, empty, values.dtype)
    matrix[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return matrix


def ids_of(prompt: types.ModelInput) -> np.ndarray:
    """Token ids of a prompt; raises ``BadInput`` for one that is not text."""
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in prompt.chunks):
        raise BadInput("images and audio are not offered: expected encoded_text chunks")
    return np.asarray(prompt.to_ints(), np.int64)


def check_ids(name: str, ids: np.ndarray, vocabulary: int, most: int) -> None:
    """Raises ``BadInput`` unless there are 1 to ``most`` tokens, all of the vocabulary."""
    if not 1 <= len(ids) <= most:
        raise BadInput(
            f"{name}: expected a token at least, and at most {most} tokens, got {len(ids)}"
        )
    if ids.min() < 0 or ids.max() >= vocabulary:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise BadInput(f"{name}: expected tokens from 0 to {vocabulary - 1}, got {wrong}")


def read_json(kind: Any, body: bytes) -> Any:
    """Reads a JSON body as a request of the SDK, or as a dict; raises ``ApiError``, 422."""
    try:
        fields = json.loads(body or b"{}")
        return dict(fields) if kind is dict else kind.model_validate(fields)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ApiError(422, f"{where}: {wrong['msg']}, got {wrong['input']!r:.80}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ApiError(422, f"expected JSON: {error}"[:200]) from None


def answer(**fields: Any) -> bytes:
    """A result as JSON; fields that are None are left out."""
    return json.dumps({k: v for k, v in fields.items() if v is not None}).encode()


def failed(error: BaseException) -> bytes:
    """The result of a call that failed."""
    if isinstance(error, OSError):
        return answer(error=f"the disk of the server: {reason(error)}", category="server")
    if isinstance(error, BadInput | ApiError):
        return answer(error=one_line(str(error)), category="user")
    return answer(error=described(error), category="server")


def passed(outputs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """The result of a pass: the log-probs of each datum, ``[N]`` or ``[N, K]``."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for trailing, group in itertools.groupby(outputs, lambda x: x.shape[1:]):
        arrays = [np.ascontiguousarray(x, np.float32) for x in group]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        batched = record.fields["logprobs"]
        batched.data = b"".join(x.tobytes() for x in arrays)
        batched.offsets = np.cumsum([0, *(x.nbytes for x in arrays)], dtype=np.int64).tobytes()
        batched.dtype = pb.DTYPE_FLOAT32
        batched.trailing_shape.extend(trailing)
    return message.SerializeToString()


Top = tuple[np.ndarray, np.ndarray]
"""Ids and log-probs of the likeliest tokens at some positions, ``[A, K]``."""


def sampled(completions: Iterable[Any]) -> pb.SampleResponse:
    """The result of sampling, to which scores may be added."""
    message = pb.SampleResponse()
    for completion in completions:
        ended = completion.reason in ("end", "stop")
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if ended else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(completion.ids, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
    return message


def write_top(message: pb.TopkLogprobs, top: Top) -> None:
    """Writes the likeliest tokens at some positions."""
    ids, logprobs = top
    message.token_ids = np.asarray(ids, np.int32).tobytes()
    message.logprobs = np.asarray(logprobs, np.float32).tobytes()
    message.length, message.k = ids.shape


def write(message: pb.Tensor, values: np.ndarray, layout: types.TensorData | Any = None) -> None:
    """Writes a matrix; in the layout of another one, where that is sparse."""
    whole = np.issubdtype(values.dtype, np.integer)
    message.dtype = pb.DTYPE_INT64 if whole else pb.DTYPE_FLOAT32
    values = np.ascontiguousarray(values, _DTYPES[message.dtype])
    message.shape.extend(values.shape)
    if layout is None or layout.sparse_crow_indices is None:
        message.dense = values.tobytes()
        return
    places = layout.sparse_crow_indices, layout.sparse_col_indices
    rows, columns = (np.asarray(place, np.int64) for place in places)
    csr = message.sparse_csr
    csr.values = values[np.repeat(np.arange(len(values)), np.diff(rows)), columns].tobytes()
    csr.crow_indices, csr.col_indices = rows.tobytes(), columns.tobytes()
