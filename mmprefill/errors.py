"""Exceptions, one class per reaction of the caller.

MMPrefillError
├── RequestError(ValueError)     fix the request: the message names request, item and accepted range
│   ├── MediaError               fix or drop that picture
│   │   ├── MediaLimitError      raise the named limit, or shrink the picture
│   │   └── MediaForbiddenError  allow the host, URL or folder, if it is meant to be allowed
│   ├── PlaceholderError         make placeholders and pictures agree
│   └── PromptTooLongError       shorten the prompt; carries the split into text and media tokens
├── MediaFetchError              the network failed; trying again may help
├── ModelError(ValueError)       choose another checkpoint or fix its folder
│   └── UnsupportedModelError    this kind of model has no path here; says why
├── ArtefactError(ValueError)    the KV file is damaged, foreign or made for something else
├── JobError(ValueError)         the output folder belongs to another job, input or setting; use another, or go back
├── DeadlineError                the request's own deadline passed; give it more time, or drop it
├── OutOfMemoryError             one request does not fit in memory, even alone
└── EngineClosedError            the engine was closed, or died (see __cause__); start a new one
"""


class MMPrefillError(Exception):
    """Base of everything that this library raises on purpose."""


class RequestError(MMPrefillError, ValueError):
    """The request itself is wrong."""


class MediaError(RequestError):
    """One picture cannot be used: not an image, damaged, empty, or of a wrong type."""


class MediaLimitError(MediaError):
    """A picture is larger than a limit allows."""


class MediaForbiddenError(MediaError):
    """A URL, host, path or kind of file that is not allowed."""


class PlaceholderError(RequestError):
    """Placeholders in the prompt and the media that were given do not agree."""


class PromptTooLongError(RequestError):
    """The prompt has more tokens than the model's context.

    Attributes:
        text_tokens: tokens that are not media rows.
        media_tokens: tokens that are media rows.
        limit: the most that is accepted.
    """

    def __init__(self, message: str, *, text_tokens: int, media_tokens: int, limit: int) -> None:
        super().__init__(message)
        self.text_tokens, self.media_tokens, self.limit = text_tokens, media_tokens, limit


class MediaFetchError(MMPrefillError):
    """A URL could not be fetched: refused, timed out or interrupted."""


class ModelError(MMPrefillError, ValueError):
    """A checkpoint cannot be loaded."""


class UnsupportedModelError(ModelError):
    """A checkpoint loads in transformers but has no path here."""


class ArtefactError(MMPrefillError, ValueError):
    """A KV artefact is damaged, foreign, or belongs to another model."""


class JobError(MMPrefillError, ValueError):
    """The output folder of a batch job cannot be used for this job."""


class DeadlineError(MMPrefillError):
    """A request was not done within its deadline."""


class OutOfMemoryError(MMPrefillError):
    """A request does not fit in memory, even alone."""


class EngineClosedError(MMPrefillError):
    """The engine was closed or died."""
