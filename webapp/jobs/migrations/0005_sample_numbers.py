"""The numbers that decide which points of a long run are drawn become columns; rows that are there get theirs from their record."""

from django.db import migrations, models
from django.db.models import FloatField
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast


def fill(apps, schema_editor):
    def read(key, field):
        # a peak is read as a float first: SQLite has it as a number, PostgreSQL as text
        return Cast(Cast(KeyTextTransform(key, "data"), FloatField()), field)

    apps.get_model("jobs", "Sample").objects.filter(kind__in=("step", "generate")).update(
        peak_bytes=read("device_peak_bytes", models.BigIntegerField()),
        loss=read("loss", FloatField()),
        tokens_per_s=read("tokens_per_s", FloatField()),
    )


class Migration(migrations.Migration):

    dependencies = [
        ("jobs", "0004_projects"),
    ]

    operations = [
        migrations.AddField(model_name="sample", name="peak_bytes", field=models.BigIntegerField(null=True)),
        migrations.AddField(model_name="sample", name="loss", field=models.FloatField(null=True)),
        migrations.AddField(model_name="sample", name="tokens_per_s", field=models.FloatField(null=True)),
        migrations.RunPython(fill, migrations.RunPython.noop),
        migrations.AddIndex(
            model_name="sample",
            index=models.Index(
                fields=["job", "kind", "attempt", "step", "peak_bytes", "loss", "tokens_per_s", "id"], name="sample_points"
            ),
        ),
    ]
