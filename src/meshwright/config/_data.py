"""Define the sources of a run's batches."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ._base import Finite, NotNegativeFloat, OptionalNotNegative, Problem, Section, raise_problems

Order = Literal["random", "epochs"]


HeldOut = Annotated[
    float,
    Field(
        gt=0,
        le=0.5,
        description="Share of the data that is kept for evaluation and never trained on.\n"
        "Effect: evaluation reads it; a larger share leaves less to train on.\nUnit: share",
    ),
]
InOrder = Annotated[
    Order,
    Field(
        description="Order of the windows; `epochs` takes each once before any comes again.\n"
        "Windows at random places may overlap. Every epoch of `epochs` has another order.\n"
        "Effect: which tokens a step reads; nothing that is weighed."
    ),
]


class DataSource(Section):
    """The base of every source: the entries that it gives, and the models that it suits."""

    gives: ClassVar[str] = ""
    suits: ClassVar[str] = ""
    """What a model must take ("images"), or the only kind of model ("linear"); empty for any model."""


class SyntheticData(DataSource):
    """Random tokens, regression rows or images made from the seed; nothing is read."""

    source: Literal["synthetic"]
    """Source of the batches.
    Effect: the loss falls only as far as noise allows; weighing reads no data."""


class LineData(DataSource):
    """Points about a line, for a linear model of one input: slope x + intercept + noise x a normal number.

    x is standard normal too; every step has new points, made from the seed.
    """

    gives, suits = "points about a line", "linear"
    source: Literal["line"]
    """Source of the batches.
    Effect: the parameters to be found are known, so a run can be checked against them."""
    slope: Finite
    """Slope of the line.
    Effect: the weight that training should find.
    Unit: none"""
    intercept: Finite
    """Height of the line at x = 0.
    Effect: the bias that training should find.
    Unit: none"""
    noise: NotNegativeFloat
    """Standard deviation of the points about the line.
    Effect: the least squared error that can be reached is its square.
    Unit: none"""


class StdlibData(DataSource):
    """Bytes of the Python standard library's own sources; every n-th file is held out."""

    gives, suits = "tokens", "sequences"
    source: Literal["python-stdlib"]
    """Source of the batches.
    Effect: real text on every machine without a download; ids are bytes, and `model.vocab_size` at least 256.
    """
    held_out_fraction: HeldOut = 0.05
    order: InOrder = "random"


class TokenFileData(DataSource):
    """A raw file of token ids, little-endian, nothing else in it; its tail is held out."""

    gives, suits = "tokens", "sequences"
    source: Literal["tokens"]
    """Source of the batches.
    Effect: trains on your own text; `meshwright data tokenize` makes the file."""
    path: Annotated[str, Field(min_length=1)]
    """The file of token ids.
    In a file it is relative to that file's folder; on the command line, to the working directory.
    Effect: what is trained on; weighing does not open it."""
    dtype: Literal["int32", "uint16", "uint32"]
    """Type of one token id in the file.
    Effect: how the file is read; another type than the file's own gives nonsense, and is refused where known.
    """
    held_out_fraction: HeldOut = 0.05
    order: InOrder = "random"
    documents: Literal["joined", "packed"] = "joined"
    """Documents of one window: joined as one text, or each apart.
    `packed` keeps attention, positions and loss inside each document.
    Effect: `packed` adds a mask to attention, which may use another kernel."""
    end_of_document: OptionalNotNegative = None
    """Id that ends each document; needed by `documents = "packed"` alone.
    Effect: where one document ends and the next begins.
    Unit: token id"""

    @model_validator(mode="after")
    def _documents_end(self) -> TokenFileData:
        problems: list[Problem] = []
        if self.documents == "packed" and self.end_of_document is None:
            what = "= 'packed' needs the id that ends a document"
            problems.append(("documents", what, "set data.end_of_document, as the tokenizer has it"))
        if self.documents == "joined" and self.end_of_document is not None:
            what = f"= {self.end_of_document} has no effect while data.documents = 'joined'"
            problems.append(("end_of_document", what, 'use data.documents = "packed"'))
        raise_problems(problems)
        return self


class IdxData(DataSource):
    """Images and labels in the IDX files of MNIST and Fashion-MNIST, plain or gzipped.

    Images are resized to the model's size. Every image comes once before any comes again; an epoch's last
    batch may be short, and is then padded with rows of weight zero.
    """

    gives, suits = "images", "images"
    source: Literal["idx"]
    """Source of the batches.
    Effect: trains on images; epochs are counted."""
    folder: Annotated[str, Field(min_length=1)]
    """Folder of the four files, under their published names.
    In a file it is relative to that file's folder; on the command line, to the working directory.
    Effect: what is trained on; weighing does not open it."""


Data = Annotated[
    SyntheticData | LineData | StdlibData | TokenFileData | IdxData, Field(discriminator="source")
]
