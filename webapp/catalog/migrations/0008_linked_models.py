"""Weights that lie elsewhere on the server, and sampling as a model's makers ask for it."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("catalog", "0007_more_dataset_formats")]

    operations = [
        migrations.AddField(model_name="model", name="linked_from", field=models.CharField(blank=True, max_length=1000)),
        migrations.AddField(model_name="model", name="linked_files", field=models.JSONField(default=list)),
        migrations.AddField(model_name="model", name="generation", field=models.JSONField(default=dict)),
    ]
