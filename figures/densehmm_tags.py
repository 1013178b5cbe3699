"""Figure 6 of the DenseHMM paper: MAD and NLL on sequences of part-of-speech tags.

The paper uses 1,000 sentences of MedPost, which is no longer available; its code uses the sample of
the Penn Treebank that comes with NLTK. Both settings are here. The Penn sample is as in the code:
3,914 sentences, traces included, cut at 45 tags, with the rarest tags, together less than 10 %,
merged. MedPost is replaced by 1,000 random sentences of UD English EWT, cut at 40 tags, with less
than 1 % merged. Half of the sentences are for training, half for testing. See
``common/densehmm.py`` for the models, the measures and the two protocols. Writes
``densehmm_tags.json`` and ``densehmm_tags.png``.
"""

from __future__ import annotations

import torch
from common import arguments, public_files
from common.densehmm import (
    DENSE_EM,
    DIRECT,
    FAIR,
    STANDARD,
    Cell,
    Claim,
    Medians,
    Source,
    everywhere,
    falls,
    flat,
    greatest,
    least,
    mostly,
    of_corpus,
    reproduce,
    standard_leads,
)
from common.papers import tags_as_values

from pyrohmm import readers


def penn() -> readers.Corpus:
    """Tags of the Penn sample."""
    path = public_files.find("treebank-sample")
    return tags_as_values(public_files.read_tagged(path, drop=()))


def web() -> readers.Corpus:
    """Tags of 1,000 sentences of UD English EWT."""
    path = public_files.find("ud-ewt-train")
    corpus = tags_as_values(public_files.read_conllu(path, "xpos"))
    order = torch.randperm(len(corpus.data), generator=torch.Generator().manual_seed(0))
    return corpus._replace(data=corpus.data[order[:1000]])


def competes(medians: Medians, cell: Cell) -> bool:
    """Whether the direct model's MAD is at most a tenth above the standard HMM's."""
    return medians.of("MAD", DIRECT, cell) <= 1.1 * medians.of("MAD", STANDARD, cell)


def dense_follow(medians: Medians, cell: Cell) -> bool:
    """Whether both DenseHMMs are at most 5 % behind the standard HMM."""
    rest = (medians.of("NLL", model, cell) for model in (DENSE_EM, DIRECT))
    return max(rest) <= 1.05 * medians.of("NLL", STANDARD, cell)


CLAIMS = [
    Claim("MAD: all but dense EM fall with n", falls("MAD", [STANDARD, FAIR, DIRECT])),
    Claim(
        "MAD: the fair standard HMM is best where it has more states (in 3 of 4 cells)",
        mostly(least("MAD", FAIR), Medians.wide),
    ),
    Claim(
        "MAD: direct is competitive where l < n (at most 10 % above standard, in 3 of 4 cells)",
        mostly(competes, Medians.narrow),
    ),
    Claim(
        "MAD: dense EM is worst (in 3 of 4 cells)", mostly(greatest("MAD", DENSE_EM), everywhere)
    ),
    Claim("MAD: that of dense EM is flat in n (within 10 %)", flat("MAD", [DENSE_EM], 0.10)),
    Claim(
        "NLL: the standard HMM is better than both dense ones (in 3 of 4 cells)",
        mostly(standard_leads, everywhere),
    ),
    Claim(
        "NLL: both dense ones are only slightly worse (within 5 %, in 3 of 4 cells)",
        mostly(dense_follow, everywhere),
    ),
]

if __name__ == "__main__":
    options = arguments(__doc__)
    quick = options.quick
    sources = [
        Source("penn", "Penn Treebank sample, tags", *of_corpus(penn, 45, 0.10, quick), CLAIMS),
        Source("web", "UD English EWT, tags", *of_corpus(web, 40, 0.01, quick), CLAIMS),
    ]
    reproduce("densehmm_tags", sources, options)
