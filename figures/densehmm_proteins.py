"""Figure 5 of the DenseHMM paper: MAD and NLL on proteins.

The paper uses the first 1,024 sequences of the Protein Data Bank as of October 2019; here they are
the first 1,024 chains of the training set of JPred4, which come from the same database, but no two
of which are similar. As in the authors' code, chains are cut at 500 residues, and the rarest
residues, together less than 5 % of all, are merged (the paper's 0.2 % would merge one). Half of the
chains are for training, half for testing. See ``common/densehmm.py`` for the models, the measures
and the two protocols. Writes ``densehmm_proteins.json`` and ``densehmm_proteins.png``.
"""

from __future__ import annotations

from common import arguments, public_files
from common.densehmm import (
    DENSE_EM,
    DIRECT,
    FAIR,
    MODELS,
    STANDARD,
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
    within,
)
from common.papers import read_proteins

from pyrohmm import readers


def chains() -> readers.Corpus:
    """The first 1,024 chains."""
    proteins = read_proteins(public_files.find("jpred4"))
    return readers.Corpus(proteins.data[:1024], proteins.vocabulary)


def falls_with_length(medians: Medians) -> tuple[float, bool]:
    """Ratio of the direct model's MAD at the largest l to that at the least, the worst over n."""
    shares = []
    for size in medians.sizes:
        dims = sorted(dim for n, dim in medians.cells if n == size)
        first, last = (medians.of("MAD", DIRECT, (size, dim)) for dim in (dims[0], dims[-1]))
        shares.append(last / first)
    return max(shares), max(shares) < 1


CLAIMS = [
    Claim("MAD: direct is best (in 3 of 4 cells)", mostly(least("MAD", DIRECT), everywhere)),
    Claim("MAD: that of direct falls with n", falls("MAD", [DIRECT])),
    Claim("MAD: that of direct falls with l (from the least to the largest)", falls_with_length),
    Claim(
        "MAD: the three others are flat in n (within 10 %)",
        flat("MAD", [STANDARD, FAIR, DENSE_EM], 0.10),
    ),
    Claim(
        "MAD: dense EM is worst (in 3 of 4 cells)", mostly(greatest("MAD", DENSE_EM), everywhere)
    ),
    Claim(
        "NLL: all four are nearly identical (within 1 %, in 3 of 4 cells)",
        mostly(within("NLL", MODELS, 0.01), everywhere),
    ),
    Claim("NLL: it does not depend on n (within 1 %)", flat("NLL", MODELS, 0.01)),
]

if __name__ == "__main__":
    options = arguments(__doc__)
    corpus = of_corpus(chains, 500, 0.05, options.quick)
    proteins = Source("proteins", "proteins", *corpus, CLAIMS)
    reproduce("densehmm_proteins", [proteins], options)
