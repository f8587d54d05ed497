"""The messages and methods of proto/, made from contracts.binpb: `JobSpec()`, `method("JobService", "Submit")`."""

import importlib.resources

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "tandem.v1."
_pool = descriptor_pool.DescriptorPool()


def _read():
    files = descriptor_pb2.FileDescriptorSet()
    files.ParseFromString(importlib.resources.files(__package__).joinpath("contracts.binpb").read_bytes())
    for file in files.file:
        _pool.AddSerializedFile(file.SerializeToString())


def _message_class(descriptor):
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return _factory.GetPrototype(descriptor)


_read()
_factory = None if hasattr(message_factory, "GetMessageClass") else message_factory.MessageFactory(_pool)


def __getattr__(name):
    """A message class."""
    try:
        made = _message_class(_pool.FindMessageTypeByName(_PACKAGE + name))
    except KeyError:
        raise AttributeError(f"proto/ has no message {name}") from None
    globals()[name] = made
    return made


def enum_name(enum, number, prefix):
    """JOB_STATE_FAILED as "failed"."""
    value = _pool.FindEnumTypeByName(_PACKAGE + enum).values_by_number[number]
    return value.name[len(prefix):].lower()


def enum_number(enum, word, prefix):
    """"failed" as JOB_STATE_FAILED; "unspecified" is none. Raises ValueError."""
    numbers = {value.name[len(prefix):].lower(): value.number for value in _pool.FindEnumTypeByName(_PACKAGE + enum).values if value.number}
    if word.lower() not in numbers:
        raise ValueError(f"'{word}' is none of {', '.join(numbers)}")
    return numbers[word.lower()]


def enum_values(enum):
    """The names of the values that say something, of an enumeration by its full name ("tandem.v1.LossPreset")."""
    return [value.name for value in _pool.FindEnumTypeByName(enum).values if value.number]


def method(service, name):
    """Path, request class, response class of an RPC."""
    found = _pool.FindServiceByName(_PACKAGE + service).methods_by_name[name]
    return f"/{_PACKAGE}{service}/{name}", _message_class(found.input_type), _message_class(found.output_type)
