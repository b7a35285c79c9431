"""Which run trained a model. Of models from before it is not known; they count as uploaded."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("catalog", "0005_model_unread")]

    operations = [
        migrations.AddField(model_name="model", name="from_job_id", field=models.CharField(blank=True, max_length=48)),
        migrations.AddIndex(model_name="model", index=models.Index(fields=["from_job_id"], name="model_from_job")),
    ]
