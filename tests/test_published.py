"""The published numbers are those that the papers print: cells read by hand, and every cell where the reference is beside the repository."""
import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT.parent / "shared/specs/published"
ELSEWHERE = {"feddc/thirdparty": "feddc_thirdparty_fedcads_readme", "claims": "in_text_claims"}
HERE = {**{f"{p.parent.name}/{p.name.split('.')[0]}": p for p in (ROOT / "papers").glob("*/*.published.csv")}, "claims": ROOT / "papers/claims.csv"}
CELLS = {  # table: (lines, [(what tells the line from the others, mean, std)]), first, middle and last line of each
    "fedadc/table1": (54, [
        (dict(method="FedAvg", dataset="CIFAR-10", participation="0.2"), "70.55", "2.5"),
        (dict(method="FedDyn", dataset="CIFAR-100", participation="0.2", partition_parameter="0.1"), "58.49", "0.32"),
        (dict(method="FedRS", dataset="CIFAR-100", participation="0.1", partition_parameter="0.1"), "", "")]),
    "fedbss/table1": (162, [
        (dict(method="FedAvg", dataset="Fashion-MNIST", partition="shards_per_client", partition_parameter="2"), "62.68", "6.30"),
        (dict(method="FedAvg", dataset="Fashion-MNIST", partition="dirichlet_alpha", partition_parameter="0.1"), "69.48", "2.59"),
        (dict(method="FedBSS", dataset="CIFAR-100", partition="dirichlet_alpha", partition_parameter="0.5"), "19.08", "0.11")]),
    "fedbss/table2": (81, [
        (dict(method="FedAvg", dataset="Fashion-MNIST", noise_ratio="0.1"), "80.19", "0.13"),
        (dict(method="FedRS", dataset="CIFAR-10", noise_ratio="0.3"), "34.28", "0.25"),
        (dict(method="FedBSS", dataset="CIFAR-100", noise_ratio="0.5"), "12.13", "0.34")]),
    "fedccfa/table1": (84, [
        (dict(method="FedAvg", dataset="Fashion-MNIST", clients="20"), "90.57", "0.18"),
        (dict(method="Ditto", dataset="Fashion-MNIST", clients="20"), "90.33", "0.15"),
        (dict(method="FedCCFA", dataset="CINIC-10", clients="100"), "58.70", "0.33")]),
    "fedccfa/table10": (84, [
        (dict(method="FedAvg", dataset="Fashion-MNIST", clients="20"), "90.38", "0.14"),
        (dict(method="Ditto", dataset="Fashion-MNIST", clients="20"), "90.26", "0.02"),
        (dict(method="FedCCFA", dataset="CINIC-10", clients="100"), "59.18", "0.25")]),
    "fedccfa/table11": (12, [
        (dict(variant="weighted aggregation", dataset="Fashion-MNIST", drift="none"), "89.39", "0.16"),
        (dict(variant="weighted aggregation", dataset="Fashion-MNIST", drift="sudden"), "89.14", "0.31"),
        (dict(variant="uniform aggregation", dataset="CINIC-10", drift="sudden"), "52.62", "0.51")]),
    "fedccfa/table12": (6, [
        (dict(method="FedPAC", dataset="Fashion-MNIST"), "1.35", ""),
        (dict(method="FedCCFA", dataset="Fashion-MNIST"), "0.49", ""),
        (dict(method="FedCCFA", dataset="CINIC-10"), "0.70", "")]),
    "fedccfa/table13": (14, [
        (dict(method="pFedMe", dirichlet_alpha="0.1 (inferred; first row)"), "65.94", ""),
        (dict(method="pFedMe", dirichlet_alpha="0.5 (inferred; second row)"), "60.42", ""),
        (dict(method="FedCCFA-FT", dirichlet_alpha="0.5 (inferred; second row)"), "79.13", "")]),
    "fedccfa/table2": (84, [
        (dict(method="FedAvg", dataset="Fashion-MNIST", clients="20"), "67.81", "1.12"),
        (dict(method="Ditto", dataset="Fashion-MNIST", clients="20"), "78.51", "0.82"),
        (dict(method="FedCCFA", dataset="CINIC-10", clients="100"), "52.62", "0.51")]),
    "fedccfa/table3": (3, [
        (dict(variant="local classifiers"), "68.39", "0.71"),
        (dict(variant="balanced classifiers"), "73.21", "0.82"),
        (dict(variant="oracle"), "73.55", "0.27")]),
    "fedccfa/table4": (3, [
        (dict(variant="w/o alignment"), "71.40", "0.43"),
        (dict(variant="w/o clustered anchors"), "72.77", "0.71"),
        (dict(variant="w/ clustered anchors"), "73.21", "0.82")]),
    "fedccfa/table5": (18, [
        (dict(variant="fixed lambda=0", dirichlet_alpha="? (< 0.1, probably 0.01)"), "62.46", "0.92"),
        (dict(variant="adaptive gamma=? (first adaptive row, below 20 by trend)", dirichlet_alpha="? (< 0.1, probably 0.01)"), "60.30", "0.79"),
        (dict(variant="adaptive gamma=? (last adaptive row, above 20 by trend)", dirichlet_alpha="0.5"), "73.32", "0.06")]),
    "fedccfa/table6": (84, [
        (dict(method="FedAvg", dataset="Fashion-MNIST", clients="20"), "88.89", "0.30"),
        (dict(method="Ditto", dataset="Fashion-MNIST", clients="20"), "87.22", "0.02"),
        (dict(method="FedCCFA", dataset="CINIC-10", clients="100"), "53.50", "0.05")]),
    "fedccfa/table7": (84, [
        (dict(method="FedAvg", dataset="Fashion-MNIST", clients="20"), "67.39", "0.72"),
        (dict(method="Ditto", dataset="Fashion-MNIST", clients="20"), "72.88", "0.33"),
        (dict(method="FedCCFA", dataset="CINIC-10", clients="100"), "46.02", "0.42")]),
    "fedccfa/table8": (84, [
        (dict(method="FedAvg", dataset="Fashion-MNIST", clients="20"), "-22.76", ""),
        (dict(method="Ditto", dataset="Fashion-MNIST", clients="20"), "-11.82", ""),
        (dict(method="FedCCFA", dataset="CINIC-10", clients="100"), "-6.08", "")]),
    "fedccfa/table9": (84, [
        (dict(method="FedAvg", dataset="Fashion-MNIST", clients="20"), "69.47", "1.13"),
        (dict(method="Ditto", dataset="Fashion-MNIST", clients="20"), "77.90", "0.69"),
        (dict(method="FedCCFA", dataset="CINIC-10", clients="100"), "53.02", "0.46")]),
    "feddc/thirdparty": (40, [
        (dict(method="FedAvg", network="LeNet", clients="100", partition="Dirichlet 0.6"), "80.95", ""),
        (dict(method="FedAvg", network="ResNet-18", clients="100", partition="Dirichlet 0.6"), "80.73", ""),
        (dict(method="FedDC", network="ResNet-18", clients="500", partition="Dirichlet 0.3"), "79.06", "")]),
    "lfd/table1": (9, [
        (dict(method="FedAvg (no constraint)"), "69.1", "0.6"),
        (dict(method="FedAvg+constraint", constraint_kind="feature", constraint_target="classifier"), "70.8", "0.4"),
        (dict(method="FedAvg+constraint", constraint_kind="parameter", constraint_target="classifier"), "69.7", "0.5")]),
    "lfd/table2": (24, [
        (dict(method="Union", dataset="CIFAR-10"), "74.5", "0.9"),
        (dict(method="MOON", dataset="CIFAR-100"), "64.3", "0.8"),
        (dict(method="LfD", dataset="AGNews"), "88.4", "0.5")]),
    "lfd/table3": (20, [
        (dict(method="FedAvg", dataset="CIFAR-10", dirichlet_beta="0.5"), "69.1", "0.6"),
        (dict(method="FedProx", dataset="CIFAR-10", dirichlet_beta="0.05"), "54.9", "0.8"),
        (dict(method="LfD", dataset="CINIC-10"), "79.8", "1.1")]),
    "lfd/table4": (20, [
        (dict(method="FedAvg", clients="50", participation="0.25"), "61.6", "1.5"),
        (dict(method="FedProx", clients="100", participation="0.25"), "56.8", "1.7"),
        (dict(method="LfD", clients="100", participation="0.5"), "62.7", "1.1")]),
    "lfd/table5": (10, [
        (dict(method="FedAvg", class_group="existing"), "1.06", ""),
        (dict(method="FedProx", class_group="absent"), "0.03", ""),
        (dict(method="LfD", class_group="absent"), "0.27", "")]),
}


def read(path):
    with open(path, newline="") as file: return list(csv.DictReader(file))


def changed(path, reference):
    "Lines of one file that the other has not, numbers by value"
    def value(text):
        try: return float(text)
        except ValueError: return text
    def lines(path): return [{k: value(v) for k, v in line.items()} for line in read(path)]
    ours, theirs = lines(path), lines(reference)
    return [line for line in ours if line not in theirs] + [line for line in theirs if line not in ours]


def test_every_table_has_cells_read_by_hand(): assert CELLS.keys() | {"claims"} == HERE.keys()


@pytest.mark.parametrize("name", CELLS)
def test_cells_read_by_hand(name):
    lines, cells = read(HERE[name]), CELLS[name][1]
    assert len(lines) == CELLS[name][0]
    for words, mean, std in cells:
        found = [line for line in lines if line | words == line]
        assert [(line["mean"], line["std"]) for line in found] == [(mean, std)], words


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference of published numbers is not beside the repository")
@pytest.mark.parametrize("name", HERE)
def test_every_cell_is_that_of_the_reference(name):
    assert not changed(HERE[name], REFERENCE / f"{ELSEWHERE.get(name, name.replace('/', '_'))}.csv")


def test_a_changed_number_is_found(tmp_path):
    text = HERE["lfd/table1"].read_text()
    (tmp_path / "x.csv").write_text(text.replace("69.1,0.6", "69.10,0.6"))
    assert not changed(HERE["lfd/table1"], tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text(text.replace("69.1,0.6", "69.2,0.6"))
    assert len(changed(HERE["lfd/table1"], tmp_path / "x.csv")) == 2
