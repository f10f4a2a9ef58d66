"""The format of the wire: protobuf and JSON to the SDK's own types, and answers back to bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from marft_jax.errors import BadInput, one_line
from marft_jax.extras.gateway.errors import ApiError

_DTYPES = {
    pb.DTYPE_FLOAT32: ("float32", np.float32),
    pb.DTYPE_INT64: ("int64", np.int64),
    pb.DTYPE_INT32: ("int64", np.int32),
}


class TinkerError(ApiError):
    """A call that is refused, in the form of this API."""

    @property
    def body(self) -> dict[str, Any]:
        return {"detail": str(self)}


class Answer(NamedTuple):
    """Result of a promise, as bytes.

    Attributes:
        proto: the body is protobuf, else JSON.
    """

    body: bytes
    proto: bool = False


class Pass(NamedTuple):
    """A forward pass, and a backward pass behind it unless it is ``forward_only``."""

    model_id: str
    seq_id: int
    data: list[types.Datum]
    loss: str
    settings: dict[str, float | str]
    forward_only: bool


def read_pass(body: bytes) -> Pass:
    """Reads the body of a ``forward_backward``; raises ``TinkerError``, 422."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
        data = [_datum(one) for one in message.data]
    except (DecodeError, ValueError, TypeError, AssertionError) as error:
        what = "expected a ForwardBackwardRequest as protobuf, of text and dense or CSR tensors"
        raise TinkerError(422, f"{what}: {one_line(str(error))}"[:400]) from None
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        settings[name] = value.text if value.HasField("text") else value.number
    which = message.model_id, message.seq_id
    return Pass(*which, data, message.loss_fn, settings, message.forward_only)


def _datum(message: pb.Datum) -> types.Datum:
    chunks = list[types.EncodedTextChunk]()
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise ValueError("images and audio are not offered: expected encoded_text chunks")
        tokens = np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
        chunks.append(types.EncodedTextChunk.model_construct(tokens=tokens))
    inputs = {name: _tensor(tensor) for name, tensor in message.loss_fn_inputs.items()}
    # spans of provenance are for stable_reinforce, which is not offered
    return types.Datum(types.ModelInput.model_construct(chunks=chunks), inputs)


def _tensor(message: pb.Tensor) -> types.TensorData:
    if message.dtype not in _DTYPES:
        raise ValueError(f"expected a tensor of float32 or int64, got type {message.dtype}")
    dtype, kind = _DTYPES[message.dtype]
    shape, csr = list(message.shape), message.sparse_csr
    if not message.HasField("sparse_csr"):
        dense = np.frombuffer(message.dense, kind)
        return types.TensorData(dense, dtype, shape or [len(dense)])  # type: ignore[arg-type]
    rows, columns = (
        np.frombuffer(x, np.int64).tolist() for x in (csr.crow_indices, csr.col_indices)
    )
    values = np.frombuffer(csr.values, kind)
    return types.TensorData(values, dtype, shape, rows, columns)  # type: ignore[arg-type]


def dense(tensor: types.TensorData | Any, empty: int = 0) -> np.ndarray:
    """Values of a tensor, dense or sparse, in its shape.

    Args:
        empty: the value of what a sparse tensor does not list.

    Raises:
        BadInput: it is no CSR matrix.
    """
    kind = np.float32 if tensor.dtype == "float32" else np.int64
    rows, values = tensor.sparse_crow_indices, np.asarray(tensor.data, kind)
    if rows is None:
        return values.reshape(tensor.shape or -1)
    shape, columns = tensor.shape or [], np.asarray(tensor.sparse_col_indices or (), int)
    rows = np.asarray(rows, int)
    fits = len(shape) == 2 and len(rows) == shape[0] + 1 and rows[0] == 0
    fits = fits and (np.diff(rows) >= 0).all() and rows[-1] == len(columns) == len(values)
    if not fits or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise BadInput(f"a sparse tensor: expected CSR of its shape, got {shape!s:.80}")
    found = np.full(shape, empty, kind)
    found[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return found


def ids_of(given: types.ModelInput) -> list[int]:
    """Token ids of a prompt; raises ``BadInput`` for one that is not text, or empty."""
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in given.chunks):
        raise BadInput("images and audio are not offered: expected encoded_text chunks")
    if not (ids := given.to_ints()):
        raise BadInput("expected a token at least, got none")
    return ids


def read_json(kind: Any, body: bytes) -> Any:
    """Reads a JSON body as a request of the SDK, or as a dict; raises ``TinkerError``, 422."""
    try:
        fields = json.loads(body or b"{}")
        return dict(fields) if kind is dict else kind.model_validate(fields)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise TinkerError(422, f"{where}: {wrong['msg']}, got {wrong['input']!r:.80}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise TinkerError(422, f"expected JSON: {error}"[:200]) from None


def answer(**fields: Any) -> Answer:
    """A result as JSON; fields that are None are left out."""
    return Answer(json.dumps({k: v for k, v in fields.items() if v is not None}).encode())


def failed(error: Exception, category: str) -> Answer:
    """The result of a call that failed."""
    return answer(error=one_line(str(error)), category=category)


def passed(outputs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> Answer:
    """The result of a pass: the log-probs of each datum, ``[N]`` or ``[N, K]``."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        message.metrics[name] = value
    for trailing, group in itertools.groupby(outputs, lambda x: x.shape[1:]):
        own = [np.ascontiguousarray(x, np.float32) for x in group]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(own))
        batched = record.fields["logprobs"]
        batched.data = b"".join(x.tobytes() for x in own)
        batched.offsets = np.cumsum([0, *(x.nbytes for x in own)], dtype=np.int64).tobytes()
        batched.dtype = pb.DTYPE_FLOAT32
        batched.trailing_shape.extend(trailing)
    return Answer(message.SerializeToString(), proto=True)


Top = tuple[np.ndarray, np.ndarray]
"""Ids and log-probs of the likeliest tokens at some positions, ``[A, K]``."""


def sampled(completions: Iterable[Any]) -> pb.SampleResponse:
    """The result of sampling, to which scores may be added."""
    message = pb.SampleResponse()
    for one in completions:
        ended = one.reason in ("end", "stop")
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if ended else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(one.ids, np.int32).tobytes(),
            logprobs=np.asarray(one.logprobs, np.float32).tobytes(),
        )
    return message


def write_top(message: pb.TopkLogprobs, top: Top) -> None:
    """Writes the likeliest tokens at some positions."""
    ids, logprobs = top
    message.token_ids = np.asarray(ids, np.int32).tobytes()
    message.logprobs = np.asarray(logprobs, np.float32).tobytes()
    message.length, message.k = ids.shape


def write(message: pb.Tensor, values: np.ndarray, kind: Any, given: Any = None) -> None:
    """Writes a matrix; in the layout of ``given``, where that is sparse."""
    message.dtype = pb.DTYPE_FLOAT32 if kind is np.float32 else pb.DTYPE_INT64
    message.shape.extend(values.shape)
    if given is None or given.sparse_crow_indices is None:
        message.dense = np.ascontiguousarray(values, kind).tobytes()
        return
    rows, columns = (
        np.asarray(x, np.int64) for x in (given.sparse_crow_indices, given.sparse_col_indices)
    )
    listed = values[np.repeat(np.arange(len(values)), np.diff(rows)), columns]
    csr = message.sparse_csr
    csr.values = np.ascontiguousarray(listed, kind).tobytes()
    csr.crow_indices, csr.col_indices = rows.tobytes(), columns.tobytes()
