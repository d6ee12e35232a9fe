"""Where a run's batches come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ._base import Finite, NotNegativeFloat, OptionalNotNegative, Problem, Section, raise_problems

Order = Literal["random", "epochs"]


class SyntheticData(Section):
    """Random tokens, regression rows or images made from the seed; nothing is read."""

    source: Literal["synthetic"]


class LineData(Section):
    """Points about a line, for a linear model of one input: slope x + intercept + noise x a normal number.

    x is standard normal too; every step has new points, made from the seed.
    """

    source: Literal["line"]
    slope: Finite
    intercept: Finite
    noise: NotNegativeFloat


class StdlibData(Section):
    """Bytes of the Python standard library's own sources; every n-th file is held out.

    `order`: as for token files.
    """

    source: Literal["python-stdlib"]
    held_out_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    order: Order = "random"


class TokenFileData(Section):
    """A raw file of token ids, little-endian, nothing else in it; its tail is held out.

    `path`: as the config file's folder sees it; the loader makes it absolute. `order`: `random` takes
    windows at any place, which may overlap; `epochs` cuts the file into windows and takes each once before
    any comes again. `documents`: `joined` lets a window be one text, whatever documents it holds; `packed`
    keeps attention, positions and loss inside each document, which ends with the id `end_of_document`.
    """

    source: Literal["tokens"]
    path: Annotated[str, Field(min_length=1)]
    dtype: Literal["int32", "uint16", "uint32"]
    held_out_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    order: Order = "random"
    documents: Literal["joined", "packed"] = "joined"
    end_of_document: OptionalNotNegative = None

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


class IdxData(Section):
    """Images and labels in the IDX files of MNIST and Fashion-MNIST, plain or gzipped.

    `folder`: holds the four files under their published names; as the config file's folder sees it. Images
    are resized to what the model takes. Every image comes once before any comes again; an epoch's last
    batch may be short, and is then padded with rows of weight zero.
    """

    source: Literal["idx"]
    folder: Annotated[str, Field(min_length=1)]


Data = Annotated[
    SyntheticData | LineData | StdlibData | TokenFileData | IdxData, Field(discriminator="source")
]
