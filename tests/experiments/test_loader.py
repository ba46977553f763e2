"""`experiments loader`: a row for each number of threads, and its errors."""

from image_helpers import write_imagenet

from experiments.commands import main


def test_rate_of_each_number_of_threads(tmp_path, capsys):
    data = write_imagenet(tmp_path / "data")
    assert main(["loader", "--data-dir", str(data), "--threads", "1", "2", "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert "`imagenet_resnet50`, batch 256; imagenet, to train on 18 images" in said
    assert [line.split("|")[1].strip() for line in said.splitlines() if line.startswith("|")][2:] == ["1", "2"]
    assert main(["loader", "--workload", "cifar10_resnet20"]) == 2
    assert "is decoded once, not while training" in capsys.readouterr().err
    assert main(["loader", "--data-dir", str(tmp_path)]) == 2
    assert "imagenet2012 is missing" in capsys.readouterr().err
